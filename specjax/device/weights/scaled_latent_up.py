"""Weights that project latents up to keys and values (MLA), as 8-bit numbers with scales."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.batched_scaled_matmul import batched_scaled_matmul
from pallas_kernels.scaled_matmul.reference import dequantised
from specjax.checkpoint.quantised.bits import BITS, name_of
from specjax.checkpoint.quantised.nearest import nearest
from specjax.checkpoint.quantised.scaled import ScaledTensor
from specjax.checkpoint.spec import TensorSpec, module_of
from specjax.device.weights.latent_up import LatentProjection, LatentUp
from specjax.device.weights.weight import weight

MIN_ROWS = 16  # of a block: see `batched_scaled_matmul.triton.MIN_DEPTH`


@weight
@dataclass(frozen=True)
class ScaledLatentUp(LatentProjection):
    """Two matrices for each of H heads: one for the head's keys, and one for its values.

    Products sum over a matrix's last axis, along which numbers are adjacent in memory. `absorb`
    multiplies queries by the keys' matrix, and sums over D_n. `project` multiplies sums of latents
    by the values' matrix, and sums over R.
    """

    values: Any  # ([H, R, D_n], [H, D_v, R])
    scales: Any = field(kw_only=True)  # f32, one array for each of the two
    blocks: tuple[tuple[int, int], ...] = field(kw_only=True)  # of the two, see `scaled_matmul`
    kernels: str = field(default="auto", kw_only=True)

    @property
    def value_dim(self) -> int:
        """See `LatentProjection`."""
        return self.values[1].shape[1]

    def expand(self, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values of latents, computed with dequantised weights."""
        keys, values = self._dequantised(latents.dtype)
        return (
            jnp.einsum("...r,hrd->...hd", latents, keys),
            jnp.einsum("...r,hdr->...hd", latents, values),
        )

    def absorb(self, queries: jax.Array) -> jax.Array:
        """See `LatentProjection`."""
        return self._multiply(queries, 0)

    def project(self, mixed: jax.Array) -> jax.Array:
        """See `LatentProjection`."""
        return self._multiply(mixed, 1)

    def plain(self, dtype: Any) -> LatentUp:
        """See `Weight`."""
        keys, values = self._dequantised(dtype)
        whole = jnp.concatenate([keys.swapaxes(1, 2), values], axis=1)
        return LatentUp(whole.reshape(-1, whole.shape[2]), len(keys), keys.shape[2])

    @property
    def numbers(self) -> tuple[str, ...]:
        """See `Weight`."""
        return (name_of(self.values[0].dtype.name),)

    def quantise(self, plain: LatentUp) -> "ScaledLatentUp":
        """See `Weight`."""
        by_head = plain.values.reshape(plain.num_heads, -1, plain.values.shape[1])
        keys, values = jnp.split(by_head, [plain.key_dim], axis=1)
        pairs = zip((keys.swapaxes(1, 2), values), self.blocks, strict=True)
        made = [nearest(x, block, BITS[self.numbers[0]]) for x, block in pairs]
        values, scales = zip(*made, strict=True)
        return replace(self, values=values, scales=scales)

    def with_kernels(self, kernels: str) -> "ScaledLatentUp":
        """See `Weight`."""
        return replace(self, kernels=kernels)

    def _multiply(self, x: jax.Array, i: int) -> jax.Array:
        given = x, self.values[i], self.scales[i]
        return batched_scaled_matmul(*given, block=self.blocks[i], kernels=self.kernels)

    def _dequantised(self, dtype: Any) -> list[jax.Array]:
        pairs = zip(self.values, self.scales, self.blocks, strict=True)
        return [dequantised(*pair, dtype) for pair in pairs]


@dataclass(frozen=True, kw_only=True)
class _Spec(TensorSpec):
    """The `TensorSpec` of the 8-bit weights that compute all heads' keys, or all heads' values.

    The file tensor [H (D_n + D_v), R] has both: for each head D_n rows for keys, then D_v for
    values.
    """

    num_heads: int
    first: int  # of a head's rows: 0, or D_n
    num_rows: int  # D_n or D_v

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSpec`."""
        return self.laid_out((self.num_rows, self.file_shapes[0][1]))

    def laid_out(self, sizes: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of an array that stacks one matrix per head.

        `sizes` is the pair (rows, columns) of a matrix. Matrices of keys are transposed.
        """
        return self.num_heads, *(sizes if self.first else sizes[::-1])

    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """See `TensorSpec.read`."""
        return [find(name).weight.read() for name in self.names]

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """See `TensorSpec`."""
        by_head = parts[0].reshape(self.num_heads, -1, parts[0].shape[1])
        own = by_head[:, self.first : self.first + self.num_rows]
        return own if self.first else own.swapaxes(1, 2)


@dataclass(frozen=True, kw_only=True)
class _ScalesSpec(_Spec):
    """The `TensorSpec` of the f32 scales of the weights in `_Spec`."""

    stored_rows: int  # that share a scale in the file
    block: tuple[int, int]  # of the engine's array, in the order of the file

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSpec`."""
        columns = -(-self.file_shapes[0][1] // self.block[1])
        return self.laid_out((self.num_rows // self.block[0], columns))

    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """See `TensorSpec.read`."""
        return [find(name).read_scales() for name in self.names]

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """See `TensorSpec`."""
        by_row = module_of(parts[0]).repeat(parts[0], self.stored_rows, axis=0)
        own = super().join([by_row[: self.file_shapes[0][0]]], dtype)
        return own[:, :: self.block[0]] if self.first else own[:, :, :: self.block[0]]


def scaled_latent_up(x: LatentUp, tensor: ScaledTensor) -> Any:
    """Return the `ScaledLatentUp` that is stored as `tensor`. It has `TensorSpec`s, not arrays.

    `x` is the same weight without quantisation. The kernel of `absorb` needs blocks whose number of
    rows is a multiple of `MIN_ROWS`; the numbers of a block share a scale. If a head's rows cannot
    be divided into such blocks, `x` itself is returned.
    """
    spec: Any = x.values
    num_rows, depth = spec.file_shapes[0]
    dims = x.key_dim, num_rows // x.num_heads - x.key_dim
    rows, columns = tensor.block
    rows = math.gcd(*dims, *([rows] if rows < num_rows else []))
    if rows % MIN_ROWS:
        return x
    block, given = (rows, columns), {"names": spec.names, "file_shapes": spec.file_shapes}
    parts = [
        {**given, "num_heads": x.num_heads, "first": first, "num_rows": size}
        for first, size in zip((0, dims[0]), dims, strict=True)
    ]
    dtype, of_file = tensor.weight.dtype.name, {"stored_rows": tensor.block[0], "block": block}
    return ScaledLatentUp(
        tuple(_Spec(**part, dtype=dtype) for part in parts),
        scales=tuple(_ScalesSpec(**part, **of_file, dtype="float32") for part in parts),
        blocks=((columns, rows), block),
    )
