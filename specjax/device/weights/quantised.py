"""The base class of matrices of quantised numbers, for all storage formats."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from specjax.device.weights.matrix import Matrix


@dataclass(frozen=True)
class Quantised(Matrix):
    """A matrix [in, out] of quantised numbers. Its array `values` is [out, ...].

    A kernel computes products with the matrix.
    """

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

    def outputs(self, ids: jax.Array) -> "Quantised":
        """Return a matrix [in, N] that has only the columns `ids` i32[N] of this matrix."""
        raise NotImplementedError

    def with_kernels(self, kernels: str) -> "Quantised":
        """See `Weight`."""
        return replace(self, kernels=kernels)

    def _multiply(self, x: jax.Array, dtype: Any, first: int) -> jax.Array:
        """Return the product of rows x [N, in] with the matrix's columns from `first` on."""
        raise NotImplementedError
