"""Weights of experts as 8-bit numbers with scales, as some checkpoints store them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from pallas_kernels.grouped_scaled_matmul import grouped_scaled_matmul
from pallas_kernels.scaled_matmul.reference import dequantised
from specjax.checkpoint.quantised.bits import BITS, name_of
from specjax.checkpoint.quantised.nearest import nearest
from specjax.checkpoint.quantised.scaled import ScaledTensor, ScalesSpec, ValuesSpec
from specjax.checkpoint.spec import TensorSpec
from specjax.device.weights.experts import ExpertMatrices, ExpertWeights
from specjax.device.weights.stacked import stacked
from specjax.device.weights.weight import weight


@weight
@dataclass(frozen=True)
class ScaledExperts(ExpertWeights):
    """A matrix [in, out] for each of E experts, as 8-bit numbers [out, in] with scales.

    `values` is [E, out, in]. Merged projections keep their own scales.
    """

    scales: jax.Array = field(kw_only=True)  # f32[E, blocks of out, blocks of in]
    block: tuple[int, int] = field(kw_only=True)  # see `scaled_matmul`

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
        return grouped_scaled_matmul(*given, block=self.block, kernels=kernels)

    def plain(self, dtype: Any) -> ExpertMatrices:
        """See `Weight`."""
        wide = dequantised(self.values, self.scales, self.block, dtype)
        return ExpertMatrices(wide.swapaxes(1, 2), self.axis)

    @property
    def numbers(self) -> tuple[str, ...]:
        """See `Weight`."""
        return (name_of(self.values.dtype.name),)

    def quantise(self, plain: ExpertMatrices) -> "ScaledExperts":
        """See `Weight`."""
        bits = BITS[self.numbers[0]]
        values, scales = nearest(plain.values.swapaxes(1, 2), self.block, bits)
        return replace(self, values=values, scales=scales)


def scaled_experts(spec: TensorSpec, tensors: Sequence[ScaledTensor]) -> Any:
    """Return `ScaledExperts` for `tensors`: a tree whose leaves are `TensorSpec`s, not arrays.

    `spec` is the `TensorSpec` of the same experts without quantisation. A block is the rows and
    columns that share a scale. The result is None if blocks differ between experts, if dtypes or
    widths of blocks differ between tensors, or if tensors are [E, in, out], not [E, out, in].
    """
    if not spec.transpose:
        return None
    each = len(tensors) // spec.num_stacked if spec.num_stacked else 1
    blocks = [tensor.block for tensor in tensors]
    if blocks != blocks[:each] * (len(blocks) // each) or len({one.form for one in tensors}) > 1:
        return None
    shapes = tuple(tensor.shape[-2:] for tensor in tensors[:each])
    one = ScalesSpec(("",) * each, shapes, dtype="float32", blocks=tuple(blocks[:each]))
    given: Any = {name: getattr(spec, name) for name in ("names", "file_shapes", "num_stacked")}
    values: Any = ValuesSpec(**given, dtype=tensors[0].weight.dtype.name)
    return ScaledExperts(values, scales=stacked(spec, one), block=one.block)
