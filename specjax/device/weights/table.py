"""Weights of embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoint.spec import stored
from specjax.device.weights.weight import Weight, weight


@weight
@dataclass(frozen=True)
class Table(Weight):
    """An embedding table with a row [D] for each token.

    A tied output head is the transposed table, so a token's row is also its column in the head.
    """

    values: jax.Array  # [V, D]
    axis: str | None = None  # the mesh axis whose devices hold consecutive tokens

    @property
    def dtype(self) -> Any:
        """The dtype of rows."""
        return self.values.dtype

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.values)

    @property
    def by_output(self) -> jax.Array:
        """The table as the matrix [out, in] of an output head."""
        return self.values

    def rows(self, ids: jax.Array) -> jax.Array:
        """Return the rows [N, D] of tokens i32[N]."""
        if self.axis is None:
            return self._at(ids)
        places = ids - jax.lax.axis_index(self.axis) * self.num_rows
        is_here = (places >= 0) & (places < self.num_rows)
        return self.total(jnp.where(is_here[:, None], self._at(places), 0))

    def multiply(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """Return the product [N, V] of rows x [N, D] with the output head.

        The product is accumulated in `dtype` if it is given.
        """
        return jnp.matmul(x, self.values.T, preferred_element_type=dtype)

    def _at(self, places: jax.Array) -> jax.Array:
        """Return the rows [N, D] at the indices `places` i32[N] of this device's array."""
        return self.values[places]


def table(names: Sequence[str], size: int, dim: int) -> Any:
    """Return a `Table` [size, dim] whose array is the `TensorSpec` of the tensors `names`."""
    return Table(stored(names, (size, dim), rows="vocab"))
