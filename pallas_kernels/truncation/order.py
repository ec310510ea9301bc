"""Order-preserving map of floats to unsigned integers, to find a threshold bit by bit."""

import jax
import jax.numpy as jnp

NUM_BITS = 32
SIGN = 1 << (NUM_BITS - 1)
INFINITE = 0x007FFFFF  # the key of -inf


def ordered(x: jax.Array) -> jax.Array:
    """Return keys u32 that have the same order as floats x f32; -0.0 and 0.0 have the same key."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(bits == jnp.uint32(SIGN), jnp.uint32(0), bits)
    return jnp.where(bits >= jnp.uint32(SIGN), ~bits, bits | jnp.uint32(SIGN))
