"""Thresholds within a Triton kernel, bit by bit: the highest key that still keeps enough weight."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.truncation.order import NUM_BITS


def highest_key(
    keys: jax.Array,
    weights: jax.Array | float,
    wanted: jax.Array,
    num_bits: int,
    is_asked: jax.Array,
    known: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Return the highest key with `num_bits` leading bits for which enough weight lies at or above.

    It is `known`, the key of the leading bits found before and their number, or 0 without them, if
    all weights do not sum to `wanted`, or if it is not asked for.
    """

    def refine(bit, key):
        trial = key | (jnp.uint32(1) << (NUM_BITS - 1 - bit).astype(jnp.uint32))
        return jnp.where(jnp.sum(jnp.where(keys >= trial, weights, 0.0)) >= wanted, trial, key)

    key, first = known or (zero_key(is_asked), 0)
    return repeat(first, num_bits, refine, key, is_asked)


def shared_digits(low: jax.Array, high: jax.Array, num_bits: int) -> tuple[jax.Array, jax.Array]:
    """Return the key of the leading digits, of `num_bits` each, that all keys between two share,
    and the number of these digits."""
    key, count = 0 * low, 0 * low.astype(jnp.int32)
    for shift in map(jnp.uint32, range(NUM_BITS - num_bits, -1, -num_bits)):
        is_shared = low >> shift == high >> shift
        key = jnp.where(is_shared, low >> shift << shift, key)
        count += is_shared.astype(jnp.int32)
    return key, count


def repeat(
    first: jax.Array | int, end: int, refine: Callable, start: jax.Array, is_asked: jax.Array
) -> jax.Array:
    """Apply `refine` to `start` with each of these indices if `is_asked`; otherwise return it."""
    return jax.lax.cond(
        is_asked, lambda x: jax.lax.fori_loop(first, end, refine, x), lambda x: x, start
    )


def zero_key(is_asked: jax.Array) -> jax.Array:
    """Return the key 0 as an array: a branch may not return a literal."""
    return (0 * is_asked.astype(jnp.int32)).astype(jnp.uint32)
