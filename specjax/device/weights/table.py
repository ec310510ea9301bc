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
    """A row [D] for each token; as an output head, where it is tied, a column."""

    values: jax.Array  # [V, D]

    def rows(self, ids: jax.Array) -> jax.Array:
        """Return the rows [N, D] of tokens i32[N]."""
        return self.values[ids]

    def multiply(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """Multiply rows x [N, D] by the columns: [N, V], accumulated in `dtype` if given."""
        return jnp.matmul(x, self.values.T, preferred_element_type=dtype)


def table(names: Sequence[str], size: int, dim: int) -> Any:
    """Return the specs of a table [V, D]."""
    return Table(stored(names, (size, dim), axes=("vocab", None)))
