"""Multiplication of rows by a weight; only this module depends on the layout of weights."""

from typing import Any

import jax
import jax.numpy as jnp


def linear(x: jax.Array, weight: jax.Array, dtype: Any = None) -> jax.Array:
    """Multiply rows [N, in] by a weight [in, out]: [N, out], accumulated in `dtype` if given."""
    return jnp.matmul(x, weight, preferred_element_type=dtype)
