"""The candidates of a row: logits that may be below or above its threshold."""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton_call import load, store
from pallas_kernels.truncation.order import ordered


class RowCandidates(NamedTuple):
    """The candidates of a row. Each tile has room for `room`, filled from its start."""

    logits: Any
    tokens: Any
    in_tile: Any  # candidates of each tile, which may be more than fit
    row: jax.Array
    room: int

    def total(self) -> tuple[jax.Array, jax.Array]:
        """Return the number of candidates, and whether all found room."""
        num_tiles = self.in_tile.shape[1]
        tiles = jnp.arange(pl.next_power_of_2(num_tiles))
        counts = load(self.in_tile.at[self.row, tiles], mask=tiles < num_tiles, other=0)
        return jnp.sum(counts), jnp.max(counts) <= self.room

    def places(self, lane: jax.Array, *, unrolls: bool) -> tuple[jax.Array, jax.Array]:
        """Return the places of candidates by their numbers, counted tile by tile, and which of them
        exist.

        Args:
            unrolls: wait for the tiles' counts once, which takes registers.
        """

        def pass_tile(carry, tile):
            end, at = carry
            in_tile = self.in_tile[self.row, tile]
            end += in_tile
            # Lanes beyond are of a later tile, whose room begins after the rest of this one's.
            return end, at + jnp.where(lane >= end, self.room - in_tile, 0)

        start, num_tiles = (0 * self.row, lane), self.in_tile.shape[1]
        if unrolls:
            end, at = reduce(pass_tile, range(num_tiles), start)
        else:
            end, at = jax.lax.fori_loop(0, num_tiles, lambda i, x: pass_tile(x, i), start)
        return at, lane < end

    def read(self, at: jax.Array, is_there: jax.Array) -> jax.Array:
        """Return the candidates at some places; -inf elsewhere."""
        return load(self.logits.at[self.row, at], mask=is_there, other=-jnp.inf)

    def exclude(self, at: jax.Array, is_there: jax.Array, least: jax.Array, out: Any) -> None:
        """Write -inf for the candidates at some places that are below a key."""
        x = load(self.logits.at[self.row, at], mask=is_there, other=jnp.inf)
        # In interpret mode masked lanes store the old value; they point past the end of the row.
        token = load(self.tokens.at[self.row, at], mask=is_there, other=out.shape[1])
        lowest = jnp.full(at.shape, -jnp.inf)
        store(out.at[self.row, token], lowest, mask=is_there & (ordered(x) < least))
