"""Counter-based noise: what a request draws depends on its seed and the place, not the batch."""

from enum import IntEnum

import jax
import jax.numpy as jnp


class Stream(IntEnum):
    """Independent sources of noise under one seed."""

    TARGET = 0  # the token at a position, by whichever way it is decoded
    DRAFT = 1  # drafts that must not share the target's noise
    ACCEPT = 2  # whether a draft stands


def gumbel_noise(
    seeds: jax.Array, stream: Stream, counters: tuple[jax.Array, ...], vocab_size: int
) -> jax.Array:
    """Standard Gumbel noise f32[N, V], keyed by (seed u32[N], stream, counters i32[N], token id).

    The draw for a token does not depend on the row, the batch or the number of drafts, so that
    plain decoding, verification and drafting see the same noise at the same position.
    """

    def row(key):
        # -log(-log(1 - u)) resolves its upper tail, which decides the argmax, down to u = 2^-33.
        bits = jax.random.bits(key, (vocab_size,), jnp.uint32)
        u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        return -jnp.log(-jnp.log1p(-u))

    return jax.vmap(row)(_keys(seeds, stream, counters))


def uniform_noise(
    seeds: jax.Array, stream: Stream, counters: tuple[jax.Array, ...], count: int
) -> jax.Array:
    """Uniform draws f32[N, count] in [0, 1), keyed as `gumbel_noise`."""
    return jax.vmap(lambda key: jax.random.uniform(key, (count,)))(_keys(seeds, stream, counters))


def _keys(seeds: jax.Array, stream: Stream, counters: tuple[jax.Array, ...]) -> jax.Array:
    def row(seed, *counters):
        key = jax.random.fold_in(jax.random.key(seed), int(stream))
        for counter in counters:
            key = jax.random.fold_in(key, counter)
        return key

    return jax.vmap(row)(seeds, *counters)
