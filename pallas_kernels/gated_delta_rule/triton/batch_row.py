"""The scalars that a kernel reads for one request: its cache slot and its new tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton_call import load


class BatchRow(NamedTuple):
    """The scalars that describe one request to a kernel."""

    index: Any
    layer: Any  # layer of the cache
    slot: Any
    count: Any  # number of new tokens
    start: Any  # position of the first new token

    @classmethod
    def read(cls, index, layer_ref, slots_ref, positions_ref):
        layer, slot = layer_ref[0], slots_ref[index]
        length = positions_ref.shape[1]
        t = jnp.arange(pl.next_power_of_2(length), dtype=jnp.int32)
        positions = load(positions_ref.at[index, t], mask=t < length, other=-1)
        count = jnp.sum((positions >= 0).astype(jnp.int32))
        return cls(index, layer, slot, count, positions_ref[index, 0])

    def is_live(self, num_slots):
        """Return whether this is a request rather than padding.

        The function also tests `start` and `layer`, although both are valid for every request. The
        tests make the compiler load these scalars together with the others. Otherwise, the compiler
        would load them after a branch on the result, and the program would wait for memory twice.
        """
        is_request = (self.count > 0) & (self.start >= 0) & (self.layer >= 0)
        return is_request & (self.slot >= 0) & (self.slot < num_slots)

    def num_pending(self, pending_ref, max_pending):
        """Return the number of pending tokens, which the state does not include yet."""
        return jnp.clip(pending_ref[self.index], 0, jnp.minimum(self.start, max_pending))


def column_of(place, num_columns):
    """Return the column of the token at position `place` in a ring buffer.

    The ring has `num_columns` columns. `place` must be at least -`num_columns`.
    """
    return jax.lax.rem(place + num_columns, num_columns)
