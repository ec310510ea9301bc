"""Truncation of logits whose columns are split over devices. The devices exchange sums."""

import jax
import jax.numpy as jnp

from pallas_kernels.truncation.order import NUM_BITS

DIGIT_BITS = 4  # bits of a threshold that one exchange of 15 sums finds


class SplitColumns:
    """Reductions over the columns of all devices along a mesh axis, inside `shard_map`."""

    def __init__(self, axis: str):
        self.axis = axis

    def count(self, num_columns: int) -> int:
        """Return the number of columns on all devices. Each device has `num_columns` columns."""
        return num_columns * jax.lax.psum(1, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        """Return the maximum [N] of x [N, V]."""
        return jax.lax.pmax(jnp.max(x, axis=-1), self.axis)

    def softmax(self, x: jax.Array) -> jax.Array:
        """Return the softmax of x [N, V]."""
        weights = jnp.exp(x - self.max(x)[:, None])
        return weights / jax.lax.psum(weights.sum(axis=-1, keepdims=True), self.axis)

    def smallest_of(self, keys: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
        """Return each row's highest threshold that keeps enough weight; see `AllColumns`.

        The devices find the threshold digit by digit, from the highest digit on. A digit has four
        bits, so the devices exchange 15 sums per row to find it. Finding the bits one by one would
        take four exchanges of one sum each, which is slower: in every exchange, the devices wait
        for each other.
        """
        digits = jnp.arange(1, 1 << DIGIT_BITS, dtype=jnp.uint32)[None]

        def refine(i, threshold):
            shift = (NUM_BITS - DIGIT_BITS * (i + 1)).astype(jnp.uint32)
            trials = threshold[:, None] | (digits << shift)
            is_kept = keys[:, None] >= trials[..., None]  # [N, digits, V], fused into the sum
            through = jnp.where(is_kept, weights[:, None], 0).sum(axis=-1)
            # Higher digits keep less weight, so the digits that keep enough come first.
            enough = jax.lax.psum(through, self.axis) >= wanted[:, None]
            return threshold | (enough.sum(axis=1, dtype=jnp.uint32) << shift)

        start = jnp.zeros(keys.shape[0], jnp.uint32)
        return jax.lax.fori_loop(0, NUM_BITS // DIGIT_BITS, refine, start)
