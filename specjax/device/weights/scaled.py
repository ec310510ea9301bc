"""Weights of projections as 8-bit numbers with scales, as some checkpoints store them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.scaled_matmul.reference import dequantised
from specjax.checkpoint.quantised.scaled import ScaledTensor, ScalesSpec, ValuesSpec
from specjax.device.weights.matrix import Dense, Matrix
from specjax.device.weights.weight import weight


@weight
@dataclass(frozen=True)
class Scaled(Matrix):
    """A matrix [in, out] as float8 or int8 numbers [out, in], with a scale for each block.

    Merged projections keep their own scales.
    """

    scales: jax.Array = field(kw_only=True)  # f32[blocks of out, blocks of in]
    block: tuple[int, int] = field(kw_only=True)  # see `scaled_matmul`
    kernels: str = field(default="auto", kw_only=True)

    @property
    def num_out(self) -> int:
        """See `Matrix`."""
        return self.values.shape[0]

    def multiply_part(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """See `Matrix`."""
        y = self._multiply(x.reshape(-1, x.shape[-1]), dtype, 0)
        return y.reshape(*x.shape[:-1], self.num_out)

    def multiply_from(self, x: jax.Array, first: int) -> jax.Array:
        """See `Matrix`."""
        return self._multiply(x, None, first)

    def plain(self, dtype: Any) -> Dense:
        """See `Weight`."""
        return Dense(dequantised(self.values, self.scales, self.block, dtype).T, self.parts)

    def with_kernels(self, kernels: str) -> "Scaled":
        """See `Weight`."""
        return replace(self, kernels=kernels)

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
