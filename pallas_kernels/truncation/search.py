"""Finds thresholds within a Triton kernel, bit by bit.

Keys are integers that have the order of the logits (see `order`). A threshold keeps all keys that
are not below it. This module finds the highest threshold that keeps enough weight.
"""

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
    """Return the highest threshold that keeps keys with a total weight of at least `wanted`.

    Only the `num_bits` leading bits of the threshold are found; the lower bits are zero. `known` is
    a key with the leading bits that are already known, paired with the number of these bits.
    `known` is None if no bits are known.

    If all weights sum to less than `wanted`, or if `is_asked` is false, the result is the known
    key, or 0 if no bits are known.
    """

    def refine(bit, key):
        trial = key | (jnp.uint32(1) << (NUM_BITS - 1 - bit).astype(jnp.uint32))
        return jnp.where(jnp.sum(jnp.where(keys >= trial, weights, 0.0)) >= wanted, trial, key)

    key, first = known or (zero_key(is_asked), 0)
    return repeat(first, num_bits, refine, key, is_asked)


def shared_digits(low: jax.Array, high: jax.Array, num_bits: int) -> tuple[jax.Array, jax.Array]:
    """Return the leading digits that all keys from `low` to `high` share, and their number.

    A digit has `num_bits` bits. The shared digits are returned as a key.
    """
    key, count = 0 * low, 0 * low.astype(jnp.int32)
    for shift in map(jnp.uint32, range(NUM_BITS - num_bits, -1, -num_bits)):
        is_shared = low >> shift == high >> shift
        key = jnp.where(is_shared, low >> shift << shift, key)
        count += is_shared.astype(jnp.int32)
    return key, count


def repeat(
    first: jax.Array | int, end: int, refine: Callable, start: jax.Array, is_asked: jax.Array
) -> jax.Array:
    """Start with x = `start`, set x = `refine(i, x)` for each i in range(first, end), and return x.

    If `is_asked` is false, return `start`.
    """
    return jax.lax.cond(
        is_asked, lambda x: jax.lax.fori_loop(first, end, refine, x), lambda x: x, start
    )


def zero_key(is_asked: jax.Array) -> jax.Array:
    """Return the key 0 as an array, because a branch of `lax.cond` must not return a literal."""
    return (0 * is_asked.astype(jnp.int32)).astype(jnp.uint32)
