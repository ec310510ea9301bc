"""Multiplication of rows by a weight; only this module depends on the layout of weights."""

from typing import Any

import jax
import jax.numpy as jnp


def linear(x: jax.Array, weight: jax.Array, dtype: Any = None) -> jax.Array:
    """Multiply rows [N, in] by a weight [in, out]: [N, out], accumulated in `dtype` if given."""
    return jnp.matmul(x, weight, preferred_element_type=dtype)


def linear_from(x: jax.Array, weight: jax.Array, first: int) -> jax.Array:
    """Multiply rows [N, in] by the columns of a weight [in, out] from `first` on: [N, out - first].

    A GPU reads these columns alone. A CPU would copy them, which takes longer than the product
    with all of them.
    """
    return jax.lax.platform_dependent(
        x,
        weight,
        cpu=lambda x, weight: linear(x, weight)[:, first:],
        default=lambda x, weight: linear(x, weight[:, first:]),
    )
