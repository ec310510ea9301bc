"""Counter-based noise: what a request draws depends on its seed and the position alone."""

import jax
import jax.numpy as jnp


def gumbel_noise(seeds: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise f32[N, V], keyed by (seed u32[N], position i32[N], token id).

    The draw for a token does not depend on the row, the batch or the number of drafts, so that
    plain decoding, verification and drafting see the same noise at the same position.
    """

    def row(seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row)(seeds, positions)
