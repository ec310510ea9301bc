"""Finds thresholds without a sort, by bisection over the bits of floats.

Each bit takes one pass over the logits.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.truncation.order import NUM_BITS, ordered
from pallas_kernels.truncation.split import SplitColumns


class AllColumns:
    """Reductions over the columns of a device that has all columns."""

    def count(self, num_columns: int) -> int:
        """Return `num_columns`, because this device has all columns."""
        return num_columns

    def max(self, x: jax.Array) -> jax.Array:
        """Return the maximum [N] of x [N, V]."""
        return jnp.max(x, axis=-1)

    def softmax(self, x: jax.Array) -> jax.Array:
        """Return the softmax of x [N, V]."""
        return jax.nn.softmax(x, axis=-1)

    def smallest_of(self, keys: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
        """Return each row's highest threshold that keeps enough weight.

        A threshold keeps all keys that are not below it. The weights of these keys must sum to at
        least `wanted` [N]. If all weights of a row sum to less, the threshold is 0, which keeps all
        keys.
        """

        def refine(bit, threshold):
            # Find the highest threshold that keeps enough weight, one bit at a time.
            trial = threshold | (jnp.uint32(1) << (NUM_BITS - 1 - bit).astype(jnp.uint32))
            through = jnp.where(keys >= trial[:, None], weights, 0).sum(axis=-1)
            return jnp.where(through >= wanted, trial, threshold)

        start = jnp.zeros(keys.shape[0], jnp.uint32)
        return jax.lax.fori_loop(0, NUM_BITS, refine, start)


ALL_COLUMNS = AllColumns()


def truncate_reference(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    columns: AllColumns | SplitColumns = ALL_COLUMNS,
) -> jax.Array:
    """See `truncate`. `columns` reduces over the columns of one device, or of several devices."""
    keys = ordered(logits)

    def cut_min_p(threshold):
        floor = columns.max(logits) + temperature * jnp.log(min_p)
        return jnp.where(min_p > 0, ordered(floor), threshold)

    def cut_top_k(threshold):
        most = columns.count(logits.shape[-1])
        wanted = jnp.where(top_k > 0, top_k, most).astype(jnp.float32)
        # Counting logits that min_p removed is harmless: the threshold never drops below its floor.
        return jnp.maximum(threshold, columns.smallest_of(keys, jnp.ones_like(logits), wanted))

    def cut_top_p(threshold):
        left = jnp.where(keys < threshold[:, None], -jnp.inf, logits)
        probs = columns.softmax(left / temperature[:, None])
        # A row with top_p = 1 must not lose tokens because its sum is rounded. A row whose top_p
        # rounds to 0 keeps the best token.
        wanted = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
        wanted = jnp.where(top_p < 1, wanted, jnp.inf)
        return jnp.maximum(threshold, columns.smallest_of(keys, probs, wanted))

    # The key of the smallest logit to keep; 0 keeps all.
    threshold = jnp.zeros(logits.shape[0], jnp.uint32)
    threshold = jax.lax.cond((min_p > 0).any(), cut_min_p, lambda x: x, threshold)
    threshold = jax.lax.cond((top_k > 0).any(), cut_top_k, lambda x: x, threshold)
    threshold = jax.lax.cond((top_p < 1).any(), cut_top_p, lambda x: x, threshold)
    return jnp.where(keys >= threshold[:, None], logits, -jnp.inf)
