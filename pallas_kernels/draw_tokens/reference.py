"""Token sampling and its noise in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

MIN_TEMPERATURE = 1e-5  # for temperatures above 0; almost greedy
MIN_TAIL = 2.0**-24  # minimum of 1 - u: the resolution of f32
PAIRED = 32  # tokens v and v + PAIRED share a call of threefry


def draw_tokens_reference(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    stream: int,
    counters: tuple[jax.Array, ...],
    token_ids: jax.Array | None,
    vocab_size: int | None,
    first: jax.Array | None = None,
) -> Any:
    """See `draw_tokens`, or `draw_scored` if `first` is not None."""
    pick: Any = argmax if first is None else scored_argmax
    num_rows = logits.shape[0] // len(seeds)
    temperature, seeds, *keyed = (jnp.repeat(x, num_rows) for x in (temperature, seeds, *counters))
    if keyed:
        keyed[0] += jnp.arange(len(seeds)) % num_rows

    def drawn(logits):
        if token_ids is not None:
            # Expand to the full vocabulary, so that columns get the noise of their token ids.
            full = jnp.full((logits.shape[0], vocab_size), -jnp.inf, logits.dtype)
            logits = full.at[:, token_ids].set(logits)
        noise = gumbel_noise(seeds, stream, tuple(keyed), logits.shape[1], first)
        is_greedy = (temperature == 0)[:, None]
        # With lower temperatures, the quotients or their rounding errors would overflow.
        divisor = jnp.maximum(temperature, MIN_TEMPERATURE)[:, None]
        return pick(jnp.where(is_greedy, logits, logits / divisor + noise))

    def best(logits):
        token = pick(logits)
        return token if token_ids is None else jnp.where(token < 0, token, token_ids[token])

    # Each branch reduces the logits itself, so that a greedy batch reads them once.
    found = jax.lax.cond((temperature > 0).any(), drawn, best, logits)
    if first is None:
        return found
    token, score = found
    return jnp.where(token < 0, token, token + first), score


def argmax(logits: jax.Array) -> jax.Array:
    """Return, for each row, the first token i32[N] that has the maximum logit.

    A row with only -inf, or with a NaN, gives -1.
    """

    def best(logits):
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # the first NaN, if any
        at_token = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
        return jnp.where(at_token > -jnp.inf, token, -1)

    def first_best(logits):
        # XLA's argmax is not vectorised on a CPU: two plain reductions take a third of the time.
        token = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        maximum = jnp.max(logits, axis=-1, keepdims=True)  # may skip NaN
        place = jnp.where(logits == maximum, token, token[-1])
        first = jnp.min(jnp.where(logits != logits, -1, place), axis=-1)
        return jnp.where(maximum[..., 0] > -jnp.inf, first, -1)

    return jax.lax.platform_dependent(logits, cpu=first_best, default=best)


def scored_argmax(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the token i32[N] of `argmax` for each row, and the token's logit f32[N].

    For a row without a possible token, the results are -1, and NaN if the row has a NaN, else -inf.
    """
    token = argmax(logits)
    score = jnp.take_along_axis(logits, jnp.maximum(token, 0)[..., None], axis=-1)[..., 0]
    return token, jnp.where(token < 0, logits.sum(axis=-1), score)


def gumbel_noise(
    seeds: jax.Array,
    stream: int,
    counters: tuple[jax.Array, ...],
    num_tokens: int,
    first: jax.Array | None = None,
) -> jax.Array:
    """Return Gumbel noise f32[N, V], keyed by seed u32[N], stream, counters i32[N] and token.

    The noise is for V = `num_tokens` tokens, starting with token `first` (i32[], a multiple of 64;
    token 0 if None).

    A token's noise does not depend on the row, the batch or the number of drafts, so that plain
    decoding, verification and drafting have the same noise at the same position.
    """

    def row(key):
        return as_gumbel(token_bits(key, num_tokens, first))

    return jax.vmap(row)(keys(seeds, stream, counters))


def token_bits(key: jax.Array, num_tokens: int, first: jax.Array | None = None) -> jax.Array:
    """Return the random bits u32[V] of V tokens under a random key (see `gumbel_noise`).

    One call of the hash threefry gives the bits of two tokens. The tokens are divided into groups
    of 64. In group g, call 32 g + i gives the bits of the group's tokens i and 32 + i. So the 32
    threads of a warp can make one call each, and read the logits of two runs of 32 adjacent tokens,
    which are whole cache lines.
    """
    num_groups = -(-num_tokens // (2 * PAIRED))
    calls = jnp.arange(num_groups * PAIRED, dtype=jnp.uint32)
    if first is not None:
        calls += (first // 2).astype(jnp.uint32)
    words = threefry_2x32(jax.random.key_data(key), jnp.stack([jnp.zeros_like(calls), calls]))
    return words.reshape(2, num_groups, PAIRED).swapaxes(0, 1).reshape(-1)[:num_tokens]


def as_gumbel(bits: jax.Array) -> jax.Array:
    """Convert random bits u32 to standard Gumbel noise f32."""
    # This form resolves the upper tail, which determines the argmax, down to u = 2^-33.
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - MIN_TAIL)
    return -jnp.log(-jnp.log1p(-u))


def keys(seeds: jax.Array, stream: int, counters: tuple[jax.Array, ...]) -> jax.Array:
    """Return a JAX random key for each row, derived from its seed, the stream and its counters."""

    def row(seed, *counters):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), int(stream))
        for counter in counters:
            key = jax.random.fold_in(key, counter)
        return key

    return jax.vmap(row)(seeds, *counters)
