"""The product with packed numbers in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp


def packed_matmul_reference(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    group: int,
    half: int,
    dtype: Any,
    first: int,
) -> jax.Array:
    """See `packed_matmul`."""
    of_groups = scales[:, first:], None if zeros is None else zeros[:, first:]
    matrix = unpacked(values[first:], *of_groups, group, half, x.shape[1], x.dtype)
    y = jnp.einsum("ni,oi->no", x, matrix, preferred_element_type=jnp.float32)
    return y.astype(dtype)


def unpacked(
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    group: int,
    half: int,
    depth: int,
    dtype: Any,
) -> jax.Array:
    """Return the matrix [O, depth], computed in f32."""
    runs = values.reshape(len(values), -1, half)
    numbers = jnp.concatenate([runs & 15, runs >> 4], axis=-1).reshape(len(values), -1)
    numbers = numbers[:, :depth].astype(jnp.float32)
    shift = 8.0 if zeros is None else _by_input(zeros, group, depth)
    return ((numbers - shift) * _by_input(scales, group, depth)).astype(dtype)


def _by_input(x: jax.Array, group: int, depth: int) -> jax.Array:
    """Return f32[O, depth] from numbers [groups, O]."""
    return jnp.repeat(x.astype(jnp.float32), group, axis=0)[:depth].T
