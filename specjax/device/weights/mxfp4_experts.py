"""Loads experts in MXFP4 (4-bit floats with a scale per 32 inputs) without unpacking them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.packed_matmul import FourBits
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.mxfp4 import BLOCK
from specjax.checkpoint.spec import TensorSpec, module_of
from specjax.device.weights.packed_experts import PackedExperts

_NAN = 255  # the only exponent that means NaN


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

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """Return the numbers in the kernel's layout, which packs blocks in pairs.

        If the number of blocks is odd, the last block is paired with zeros.
        """
        (stored,), xp = parts, module_of(parts[0])
        stored = xp.pad(stored, ((0, 0), (0, 0), (0, stored.shape[2] % 2), (0, 0)))
        first, second = stored[:, :, ::2], stored[:, :, 1::2]
        even, odd = (first & 15) | (second << 4), (first >> 4) | (second & 240)
        return xp.stack([even, odd], axis=-1).reshape(self.shape)


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

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """See `TensorSpec`."""
        return parts[0].swapaxes(1, 2)


def mxfp4_specs(spec: TensorSpec) -> Any:
    """Return `PackedExperts` that have `TensorSpec`s instead of arrays.

    `spec` is the `MXFP4Spec` of the same experts. Loading `spec` itself would unpack the numbers.
    """
    (blocks, scales), shapes = spec.names, spec.file_shapes
    numbers: Any = _NumbersSpec((blocks,), shapes[:1], dtype="uint8")
    exponents: Any = _ExponentsSpec((scales,), shapes[1:], dtype="uint8")
    form = FourBits(BLOCK, is_float=True)
    return PackedExperts(numbers, scales=exponents, num_in=spec.shape[1], form=form)
