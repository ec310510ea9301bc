"""Weights of experts in MXFP4, which stay packed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_mxfp4_matmul import grouped_mxfp4_matmul
from pallas_kernels.grouped_mxfp4_matmul.reference import unpacked
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.mxfp4 import BLOCK
from specjax.checkpoint.quantised.nearest import in_blocks
from specjax.checkpoint.quantised.nearest4 import nearest_e2m1, shared_exponents
from specjax.checkpoint.spec import TensorSpec
from specjax.device.weights.experts import ExpertMatrices, ExpertWeights
from specjax.device.weights.weight import weight

_NAN = 255  # the only exponent that is not a number's


@weight
@dataclass(frozen=True)
class MXFP4Experts(ExpertWeights):
    """A matrix [in, out] for each of E experts, as numbers u8[E, out, bytes] of four bits.

    `grouped_mxfp4_matmul` describes the arrays.
    """

    scales: jax.Array = field(kw_only=True)  # u8[E, in / 32, out], exponents

    def multiply(
        self,
        x: jax.Array,
        sizes: jax.Array,
        *,
        sources: jax.Array | None = None,
        targets: jax.Array | None = None,
        kernels: str,
    ) -> jax.Array:
        """See `ExpertWeights`."""
        given = x, self.values, self.scales, sizes, sources, targets
        return grouped_mxfp4_matmul(*given, kernels=kernels)

    def plain(self, dtype: Any) -> ExpertMatrices:
        """See `Weight`."""
        wide = unpacked(self.values, self.scales, dtype)
        return ExpertMatrices(wide.swapaxes(1, 2), self.axis)

    @property
    def numbers(self) -> tuple[str, ...]:
        """See `Weight`."""
        return ("fp4",)

    def quantise(self, plain: ExpertMatrices) -> "MXFP4Experts":
        """See `Weight`."""
        matrices = plain.values.swapaxes(1, 2)
        exponents = shared_exponents(matrices, BLOCK)  # [E, out, in / 32]
        blocks = in_blocks(matrices, (1, BLOCK)).squeeze(-3)
        codes = nearest_e2m1(jnp.ldexp(blocks.astype(jnp.float32), -exponents[..., None]))
        scales = (exponents + 127).astype(jnp.uint8).swapaxes(1, 2)
        stored = codes[..., ::2] | (codes[..., 1::2] << 4)
        return replace(self, values=paired(stored), scales=scales)


def paired(stored: jax.Array) -> jax.Array:
    """Return the bytes u8[E, out, bytes] of `MXFP4Experts`.

    `stored` u8[E, out, blocks, 16] has adjacent numbers in a byte. Blocks are joined in pairs; a
    single last block is joined with 0.
    """
    stored = jnp.pad(stored, ((0, 0), (0, 0), (0, stored.shape[2] % 2), (0, 0)))
    first, second = stored[:, :, ::2], stored[:, :, 1::2]
    even, odd = (first & 15) | (second << 4), (first >> 4) | (second & 240)
    return jnp.stack([even, odd], axis=-1).reshape(*stored.shape[:2], -1)


@dataclass(frozen=True)
class _PackedSpec(TensorSpec):
    @property
    def is_packed(self) -> bool:
        """See `TensorSpec`."""
        return True


@dataclass(frozen=True)
class _NumbersSpec(_PackedSpec):
    """The `TensorSpec` of the 4-bit numbers.

    The file tensor is [E, out, in / 32, 16]: blocks of 32 numbers, with adjacent numbers in a byte.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSpec`."""
        num_experts, num_out, num_blocks, _ = self.file_shapes[0]
        return num_experts, num_out, BLOCK * -(-num_blocks // 2)

    def join(self, parts: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
        """See `TensorSpec`."""
        (stored,) = parts
        return paired(stored)


@dataclass(frozen=True)
class _ExponentsSpec(_PackedSpec):
    """The `TensorSpec` of the exponents of scales. The file tensor is u8[E, out, in / 32]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSpec`."""
        num_experts, num_out, num_blocks = self.file_shapes[0]
        return num_experts, num_blocks, num_out

    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """See `TensorSpec.read`.

        Raises:
            CheckpointError: a scale is NaN.
        """
        (name,), (exponents,) = self.names, super().read(find)
        if (exponents == _NAN).any():
            raise CheckpointError(
                f"{find(name).path}: {name} has scales that are NaN; download or export the "
                "checkpoint again"
            )
        return [exponents]

    def join(self, parts: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
        """See `TensorSpec`."""
        return parts[0].swapaxes(1, 2)


def packed_experts(spec: TensorSpec) -> Any:
    """Return `MXFP4Experts` with `TensorSpec`s in the places of arrays.

    `spec` is the `MXFP4Spec` by which the same experts would be unpacked.
    """
    (blocks, scales), shapes = spec.names, spec.file_shapes
    numbers: Any = _NumbersSpec((blocks,), shapes[:1], dtype="uint8")
    exponents: Any = _ExponentsSpec((scales,), shapes[1:], dtype="uint8")
    return MXFP4Experts(numbers, scales=exponents)
