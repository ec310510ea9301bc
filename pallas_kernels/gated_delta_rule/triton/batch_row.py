"""A row of the batch as a kernel's program sees it: whose state it is, and which tokens are new."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton_call import load


class BatchRow(NamedTuple):
    """One request's part of a call, in scalars."""

    index: Any
    layer: Any  # of the cache
    slot: Any
    count: Any  # new tokens
    start: Any  # place of the first of them

    @classmethod
    def read(cls, index, layer_ref, slots_ref, positions_ref):
        layer, slot = layer_ref[0], slots_ref[index]
        length = positions_ref.shape[1]
        t = jnp.arange(pl.next_power_of_2(length), dtype=jnp.int32)
        positions = load(positions_ref.at[index, t], mask=t < length, other=-1)
        count = jnp.sum((positions >= 0).astype(jnp.int32))
        return cls(index, layer, slot, count, positions_ref[index, 0])

    def is_live(self, num_slots):
        """Whether there is a request, and not padding."""
        return (self.count > 0) & (self.slot >= 0) & (self.slot < num_slots)

    def num_pending(self, pending_ref, max_pending):
        """Tokens before the new ones that the state lacks."""
        return jnp.clip(pending_ref[self.index], 0, jnp.minimum(self.start, max_pending))


def column_of(place, num_columns):
    """The ring's column of the token at a place, which may be the last few before 0."""
    return jax.lax.rem(place + num_columns, num_columns)
