"""Unsigned integers in the order of floats, by which a threshold is found bit by bit."""

import jax
import jax.numpy as jnp

NUM_BITS = 32
SIGN = 1 << (NUM_BITS - 1)
INFINITE = 0x007FFFFF  # the key of -inf


def ordered(x: jax.Array) -> jax.Array:
    """Keys u32 in the order of the floats f32 they are made of; -0.0 ties with 0.0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(bits == jnp.uint32(SIGN), jnp.uint32(0), bits)
    return jnp.where(bits >= jnp.uint32(SIGN), ~bits, bits | jnp.uint32(SIGN))
