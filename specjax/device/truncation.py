"""Top-k, top-p and min-p without a sort: thresholds found by bisection over the floats' bits."""

import jax
import jax.numpy as jnp

NUM_BITS = 32


def truncate(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Logits f32[N, V] with those outside of min_p, top_k and top_p (each [N]) at -inf.

    Each works on what the ones before it left: min_p keeps p >= min_p max(p); top_k (0 for all)
    the k largest; top_p the fewest largest that sum to at least top_p of what is left. Logits that
    tie with the last one kept stay, so the outcome does not depend on an order among equals.
    """
    floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)[:, None]
    logits = jnp.where(logits < floor, -jnp.inf, logits)

    def keep_top_k(logits):
        ones = jnp.ones_like(logits)
        wanted = jnp.where(top_k > 0, top_k, logits.shape[-1]).astype(jnp.float32)
        return _keep_largest(logits, ones, wanted)

    def keep_top_p(logits):
        probs = jax.nn.softmax(logits, axis=-1)
        # A row that keeps all must not lose what rounding leaves of its sum, and one whose top_p
        # rounds to 0 keeps the best.
        wanted = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
        return _keep_largest(logits, probs, jnp.where(top_p < 1, wanted, jnp.inf))

    logits = jax.lax.cond((top_k > 0).any(), keep_top_k, lambda x: x, logits)
    return jax.lax.cond((top_p < 1).any(), keep_top_p, lambda x: x, logits)


def _keep_largest(logits: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The fewest largest logits of each row whose weights sum to `wanted` [N], ties included.

    Rows whose weights do not come to it keep everything.
    """
    keys = _ordered(logits)

    def refine(bit, threshold):
        # The highest threshold that still lets enough through, one bit at a time.
        trial = threshold | (jnp.uint32(1) << (NUM_BITS - 1 - bit).astype(jnp.uint32))
        through = jnp.where(keys >= trial[:, None], weights, 0).sum(axis=-1)
        return jnp.where(through >= wanted, trial, threshold)

    start = jnp.zeros(logits.shape[0], jnp.uint32)
    threshold = jax.lax.fori_loop(0, NUM_BITS, refine, start)
    return jnp.where(keys >= threshold[:, None], logits, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the floats they are made of."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << (NUM_BITS - 1))
    bits = jnp.where(bits == sign, jnp.uint32(0), bits)  # -0.0 ties with 0.0
    return jnp.where(bits & sign, ~bits, bits | sign)
