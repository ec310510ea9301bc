"""Weights of projections as float8 numbers with scales, as some checkpoints store them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.scaled_matmul.reference import dequantised
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.scaled import STORED, ScaledTensor, ScalesSpec, ValuesSpec
from specjax.checkpoint.spec import TensorSpec
from specjax.device.weights.matrix import Dense, Matrix
from specjax.device.weights.weight import is_weight, weight


@weight
@dataclass(frozen=True)
class Scaled(Matrix):
    """A matrix [in, out] as float8 numbers [out, in], with a scale for each block.

    Merged projections keep their own scales.
    """

    scales: jax.Array = field(kw_only=True)  # f32[blocks of out, blocks of in]
    block: tuple[int, int] = field(kw_only=True)  # see `scaled_matmul`
    kernels: str = field(default="auto", kw_only=True)

    @property
    def num_out(self) -> int:
        """See `Matrix`."""
        return self.values.shape[0]

    def multiply(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """See `Matrix`."""
        y = self._multiply(x.reshape(-1, x.shape[-1]), dtype, 0)
        return y.reshape(*x.shape[:-1], self.num_out)

    def multiply_from(self, x: jax.Array, first: int) -> jax.Array:
        """See `Matrix`."""
        return self._multiply(x, None, first)

    def with_kernels(self, kernels: str) -> "Scaled":
        """See `Weight`."""
        return replace(self, kernels=kernels)

    def _multiply(self, x: jax.Array, dtype: Any, first: int) -> jax.Array:
        given = x, self.values, self.scales, self.block, dtype, first
        return scaled_matmul(*given, kernels=self.kernels)


def dequantise(params: Any, dtype: Any) -> Any:
    """Return a tree of parameters in which every `Scaled` is `Dense`, in `dtype`."""

    def of(x: Any) -> Any:
        if not isinstance(x, Scaled):
            return x
        return Dense(dequantised(x.values, x.scales, x.block, dtype).T, x.parts)

    return jax.tree.map(of, params, is_leaf=is_weight)


def as_stored(specs: Any, files: TensorFiles, rename: Callable[[str], str]) -> Any:
    """Return specs in which matrices of float8 tensors with scales are `Scaled`.

    A matrix that merges tensors stays `Dense` if some have no scales, or other blocks of columns.

    Args:
        specs: a tree of `TensorSpec`.
        files: the result of `with_scales`.
        rename: see `load_params`.
    """

    def of(x: Any) -> Any:
        if not isinstance(x, Dense):
            return x
        spec: Any = x.values
        found = [files.tensors.get(rename(name)) for name in spec.names]
        tensors = [tensor for tensor in found if isinstance(tensor, ScaledTensor)]
        is_whole = len(tensors) == len(found)
        if not is_whole or len({tensor.block[1] for tensor in tensors}) > 1:
            return x
        return _scaled(x, spec, tuple(tensor.block for tensor in tensors))

    return jax.tree.map(of, specs, is_leaf=is_weight)


def _scaled(matrix: Dense, spec: TensorSpec, blocks: tuple[tuple[int, int], ...]) -> Any:
    given = {"interleaved": spec.interleaved, "axes": spec.axes[::-1]}
    values = ValuesSpec(spec.names, spec.file_shapes, dtype=STORED.name, **given)
    scales = ScalesSpec(
        spec.names, spec.file_shapes, dtype="float32", blocks=blocks, interleaved=spec.interleaved
    )
    return Scaled(values, matrix.parts, scales=scales, block=scales.block)  # pyright: ignore
