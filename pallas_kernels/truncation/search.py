"""Thresholds within a Triton kernel, bit by bit: the highest key that still keeps enough weight."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.truncation.order import NUM_BITS


def highest_key(
    keys: jax.Array, weights: jax.Array, wanted: jax.Array, num_bits: int, is_asked: jax.Array
) -> jax.Array:
    """Return the highest key with `num_bits` leading bits for which enough weight lies at or above.

    It is 0 if all weights do not sum to `wanted`, or if it is not asked for.
    """

    def refine(bit, key):
        trial = key | (jnp.uint32(1) << (NUM_BITS - 1 - bit).astype(jnp.uint32))
        return jnp.where(jnp.sum(jnp.where(keys >= trial, weights, 0.0)) >= wanted, trial, key)

    return repeat(num_bits, refine, zero_key(is_asked), is_asked)


def repeat(times: int, refine: Callable, start: jax.Array, is_asked: jax.Array) -> jax.Array:
    """Apply `refine` to `start` this many times if `is_asked`; otherwise return `start`."""
    return jax.lax.cond(
        is_asked, lambda x: jax.lax.fori_loop(0, times, refine, x), lambda x: x, start
    )


def zero_key(is_asked: jax.Array) -> jax.Array:
    """The key 0, but no literal, which a branch may not return."""
    return (0 * is_asked.astype(jnp.int32)).astype(jnp.uint32)
