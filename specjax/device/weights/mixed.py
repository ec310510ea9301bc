"""Weights of merged projections that checkpoints store in different formats."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from specjax.device.weights.matrix import Dense, Matrix
from specjax.device.weights.weight import weight


@weight
@dataclass(frozen=True)
class Mixed(Matrix):
    """Several matrices side by side, in different formats, used as one matrix [in, out]."""

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

    def plain(self, dtype: Any) -> Dense:
        """See `Weight`."""
        parts = [one.plain(dtype).values for one in self.values]
        return Dense(jnp.concatenate(parts, axis=1), self.parts, self.axis)

    @property
    def numbers(self) -> tuple[str, ...]:
        """See `Weight`."""
        return tuple(name for one in self.values for name in one.numbers)

    def quantise(self, plain: Dense) -> "Mixed":
        """See `Weight`."""
        ends = list(accumulate(one.num_out for one in self.values))
        parts = jnp.split(plain.values, ends[:-1], axis=1)
        pairs = zip(self.values, parts, strict=True)
        return replace(self, values=tuple(one.quantise(Dense(part)) for one, part in pairs))

    def with_kernels(self, kernels: str) -> "Mixed":
        """See `Weight`."""
        return replace(self, values=tuple(one.with_kernels(kernels) for one in self.values))
