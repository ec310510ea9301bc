"""Weights of projections as 8-bit numbers with scales, as some checkpoints store them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.scaled_matmul.reference import dequantised
from specjax.checkpoint.quantised.bits import BITS, name_of
from specjax.checkpoint.quantised.nearest import nearest
from specjax.checkpoint.quantised.scaled import ScaledTensor, ScalesSpec, ValuesSpec
from specjax.device.weights.matrix import Dense
from specjax.device.weights.quantised import Quantised
from specjax.device.weights.weight import weight


@weight
@dataclass(frozen=True)
class Scaled(Quantised):
    """A matrix [in, out] as float8 or int8 numbers [out, in], with a scale for each block.

    Merged projections keep their own scales.
    """

    scales: jax.Array = field(kw_only=True)  # f32[blocks of out, blocks of in]
    block: tuple[int, int] = field(kw_only=True)  # see `scaled_matmul`

    def plain(self, dtype: Any) -> Dense:
        """See `Weight`."""
        matrix = dequantised(self.values, self.scales, self.block, dtype).T
        return Dense(matrix, self.parts, self.axis)

    @property
    def numbers(self) -> tuple[str, ...]:
        """See `Weight`."""
        return (name_of(self.values.dtype.name),)

    def quantise(self, plain: Any) -> "Scaled":
        """Return the weight `plain`, quantised like this weight.

        If devices hold parts of the inputs, call this in a `vmap` with the axis name `self.axis`.
        """
        bits = BITS[self.numbers[0]]
        matrix = plain.by_output
        # Devices that hold parts of the inputs share the scales of outputs.
        axis = self.axis if self.block[1] >= matrix.shape[1] else None
        values, scales = nearest(matrix, self.block, bits, axis=axis)
        return replace(self, values=values, scales=scales)

    def outputs(self, ids: jax.Array) -> "Scaled":
        """See `Quantised`."""
        rows, columns = self.block
        scales = self.scales[ids // rows]
        return replace(self, values=self.values[ids], scales=scales, block=(1, columns))

    def _multiply(self, x: jax.Array, dtype: Any, first: int) -> jax.Array:
        given = x, self.values, self.scales, self.block, dtype, first
        return scaled_matmul(*given, kernels=self.kernels)


def scaled_specs(given: Mapping[str, Any], tensors: Sequence[ScaledTensor]) -> Scaled:
    """Return the `Scaled` that merges `tensors`, with `TensorSpec`s in the places of arrays.

    All tensors have the same `form`. `given` maps fields of `TensorSpec`, for example `names`, to
    their values for these tensors.
    """
    blocks = tuple(tensor.block for tensor in tensors)
    values: Any = ValuesSpec(**given, dtype=tensors[0].weight.dtype.name)
    scales: Any = ScalesSpec(**given, dtype="float32", blocks=blocks)
    return Scaled(values, scales=scales, block=scales.block)
