"""Weights of experts in MXFP4 (OCP Microscaling, 2023), where 32 floats of 4 bits share a scale.

A byte holds two 4-bit codes, the first in the lower bits. A scale is a power of two, stored as its
exponent plus 127. An `MXFP4Spec` unpacks weights; every value is exact in bfloat16. Engines replace
this spec by specs that keep the weights packed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.checkpoint.quantised.packed import E2M1
from specjax.checkpoint.spec import TensorSpec, cut_rows, module_of

BLOCK = 32  # numbers that share a scale


@dataclass(frozen=True)
class MXFP4Spec(TensorSpec):
    """The `TensorSpec` of experts' weights [E, in, out] in MXFP4.

    The file tensors are blocks u8[E, out, in / 32, 16] and scales u8[E, out, in / 32].
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the engine array."""
        num_experts, num_out, num_blocks, _ = self.file_shapes[0]
        return num_experts, num_blocks * BLOCK, num_out

    @property
    def is_packed(self) -> bool:
        """Always True; see `TensorSpec.is_packed`."""
        return True

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """Return the engine array in `dtype`, unpacked from `parts`: the blocks and the scales."""
        blocks, scales = parts
        xp = module_of(blocks)
        halves = xp.stack([blocks & 15, blocks >> 4], axis=-1)
        values = xp.array(E2M1, np.float32)[halves]
        values = values.reshape(*scales.shape, BLOCK)
        numbers = xp.ldexp(values, scales.astype(np.int32)[..., None] - 127)
        return numbers.reshape(*scales.shape[:2], -1).swapaxes(1, 2).astype(self.dtype or dtype)


def mxfp4_experts(
    name: str,
    num_experts: int,
    num_in: int,
    num_out: int,
    *,
    rows: str | None = None,
    columns: str | None = None,
) -> Any:
    """Return the `TensorSpec` of experts [E, in, out] stored as `name`_blocks and `name`_scales.

    `rows` names the input axis, and `columns` the output axis, for a division over devices (see
    `TensorSpec.cuts`). Give at most one of these names. Sections of the input axis count blocks of
    32 inputs. If `division.divide` has a share named "experts", devices take whole experts instead
    of parts of the named axis. Without a name, every device has all experts.

    `num_in` must be a multiple of 32.
    """
    scales = num_experts, num_out, num_in // BLOCK
    shapes = (*scales, BLOCK // 2), scales
    cuts = cut_rows(shapes, rows or columns, 2 if rows else 1, groups="experts")
    return MXFP4Spec(
        (f"{name}_blocks", f"{name}_scales"), shapes, cuts=cuts, divides_input=rows is not None
    )
