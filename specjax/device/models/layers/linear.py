"""The one place that multiplies rows by a weight, and so the one that knows how weights lie."""

from typing import Any

import jax
import jax.numpy as jnp


def linear(x: jax.Array, weight: jax.Array, dtype: Any = None) -> jax.Array:
    """Rows [N, in] times a weight [in, out]: [N, out], summed and kept in `dtype` if given."""
    return jnp.matmul(x, weight, preferred_element_type=dtype)
