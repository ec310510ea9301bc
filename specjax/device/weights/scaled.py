"""Weights of projections as float8 numbers with scales, as some checkpoints store them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.scaled_matmul.reference import dequantised
from specjax.checkpoint.division import DividedSpec
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

    def multiply_part(self, x: jax.Array, dtype: Any = None) -> jax.Array:
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


@weight
@dataclass(frozen=True)
class Mixed(Matrix):
    """Adjacent matrices in different forms, used as one matrix."""

    values: Any  # tuple[Matrix, ...]

    @property
    def num_out(self) -> int:
        """See `Matrix`."""
        return sum(one.num_out for one in self.values)

    def multiply_part(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """See `Matrix`."""
        return jnp.concatenate([one.multiply(x, dtype) for one in self.values], axis=-1)

    def multiply_from(self, x: jax.Array, first: int) -> jax.Array:
        """See `Matrix`."""
        made = []
        for one in self.values:
            if first < one.num_out:
                made.append(one.multiply_from(x, max(first, 0)))
            first -= one.num_out
        return jnp.concatenate(made, axis=-1)

    def with_kernels(self, kernels: str) -> "Mixed":
        """See `Weight`."""
        return replace(self, values=tuple(one.with_kernels(kernels) for one in self.values))


def dequantise(params: Any, dtype: Any) -> Any:
    """Return a tree of parameters in which every matrix is `Dense`, in `dtype`."""

    def of(x: Any) -> Any:
        if isinstance(x, Mixed):
            return Dense(jnp.concatenate([of(one).values for one in x.values], axis=1), x.parts)
        if isinstance(x, Scaled):
            return Dense(dequantised(x.values, x.scales, x.block, dtype).T, x.parts)
        return x

    return jax.tree.map(of, params, is_leaf=is_weight)


def as_stored(specs: Any, files: TensorFiles, rename: Callable[[str], str]) -> Any:
    """Return `specs`, in which matrices of float8 tensors with scales are `Scaled`.

    A matrix that merges tensors is `Mixed` if only some of them have scales, or if the blocks that
    share a scale differ in width. Matrices that are divided over devices stay `Dense`, and their
    tensors are dequantised.

    Args:
        specs: a tree of `TensorSpec`.
        files: the result of `with_scales`.
        rename: see `load_params`.
    """

    def of(x: Any) -> Any:
        if not isinstance(x, Dense) or isinstance(x.values, DividedSpec):
            return x
        spec: Any = x.values
        found = [files.tensors.get(rename(name)) for name in spec.names]
        blocks = [tensor.block if isinstance(tensor, ScaledTensor) else None for tensor in found]
        widths = [block and block[1] for block in blocks]
        groups = groupby(range(len(blocks)), widths.__getitem__)
        made = [_one_form(spec, blocks, [*places]) for _, places in groups]
        return Mixed(tuple(made), x.parts) if len(made) > 1 else replace(made[0], parts=x.parts)

    return jax.tree.map(of, specs, is_leaf=is_weight)


def _one_form(spec: TensorSpec, blocks: Sequence[tuple[int, int] | None], at: list[int]) -> Any:
    """Return the `Dense` or `Scaled` matrix of the adjacent tensors at the indices `at`.

    These tensors have scale blocks of the same width, or none of them has scales.
    """
    own = slice(at[0], at[-1] + 1)
    given: dict[str, Any] = {"names": spec.names[own], "file_shapes": spec.file_shapes[own]}
    given["interleaved"] = spec.interleaved[own]
    found = [block for block in blocks[own] if block]
    if not found:
        plain: Any = replace(spec, **given)
        return Dense(plain)
    values: Any = ValuesSpec(**given, dtype=STORED.name)
    scales: Any = ScalesSpec(**given, dtype="float32", blocks=tuple(found))
    return Scaled(values, scales=scales, block=scales.block)
