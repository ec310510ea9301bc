"""Drawing tokens in plain JAX, and the noise itself."""

import jax
import jax.numpy as jnp

MIN_TEMPERATURE = 1e-5  # of those above 0; draws as good as greedily
MIN_TAIL = 2.0**-24  # of 1 - u: what f32 holds


def draw_tokens_reference(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    stream: int,
    counters: tuple[jax.Array, ...],
    token_ids: jax.Array | None,
    vocab_size: int | None,
) -> jax.Array:
    """See `draw_tokens`."""
    num_rows = logits.shape[0] // len(seeds)
    temperature, seeds, *keyed = (jnp.repeat(x, num_rows) for x in (temperature, seeds, *counters))
    if keyed:
        keyed[0] += jnp.arange(len(seeds)) % num_rows

    def drawn(logits):
        if token_ids is not None:
            # All columns of all tokens, so that the noise is made as for them.
            full = jnp.full((logits.shape[0], vocab_size), -jnp.inf, logits.dtype)
            logits = full.at[:, token_ids].set(logits)
        noise = gumbel_noise(seeds, stream, tuple(keyed), logits.shape[1])
        is_greedy = (temperature == 0)[:, None]
        # Below the least one the quotients, or their rounding errors, would overflow.
        divisor = jnp.maximum(temperature, MIN_TEMPERATURE)[:, None]
        return argmax(jnp.where(is_greedy, logits, logits / divisor + noise))

    def best(logits):
        return argmax(logits) if token_ids is None else token_ids[argmax(logits)]

    # Each branch reduces the logits itself, so that a greedy batch reads them once.
    return jax.lax.cond((temperature > 0).any(), drawn, best, logits)


def argmax(logits: jax.Array) -> jax.Array:
    """The first best token i32[N] of each row."""

    def best(logits):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def first_best(logits):
        # XLA's reduction to an index is not vectorised on a CPU: two plain ones take a third.
        token = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        is_best = logits == jnp.max(logits, axis=-1, keepdims=True)
        return jnp.min(jnp.where(is_best, token, token[-1]), axis=-1)

    return jax.lax.platform_dependent(logits, cpu=first_best, default=best)


def gumbel_noise(
    seeds: jax.Array, stream: int, counters: tuple[jax.Array, ...], vocab_size: int
) -> jax.Array:
    """Standard Gumbel noise f32[N, V], keyed by seed u32[N], stream, counters i32[N] and token.

    The draw for a token does not depend on the row, the batch or the number of drafts, so that
    plain decoding, verification and drafting see the same noise at the same position.
    """

    def row(key):
        return as_gumbel(jax.random.bits(key, (vocab_size,), jnp.uint32))

    return jax.vmap(row)(keys(seeds, stream, counters))


def as_gumbel(bits: jax.Array) -> jax.Array:
    """Random bits u32 as standard Gumbel noise f32."""
    # -log(-log(1 - u)) resolves its upper tail, which decides the argmax, down to u = 2^-33.
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - MIN_TAIL)
    return -jnp.log(-jnp.log1p(-u))


def keys(seeds: jax.Array, stream: int, counters: tuple[jax.Array, ...]) -> jax.Array:
    """A key of JAX's for each row."""

    def row(seed, *counters):
        key = jax.random.fold_in(jax.random.key(seed), int(stream))
        for counter in counters:
            key = jax.random.fold_in(key, counter)
        return key

    return jax.vmap(row)(seeds, *counters)
