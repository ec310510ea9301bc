"""The logits of a row that may be below its threshold or above, as programs of rows see them."""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton_call import load, store
from pallas_kernels.truncation.order import ordered


class RowCandidates(NamedTuple):
    """Each tile of the row has room for some, which its own fill from the first place on."""

    logits: Any
    tokens: Any
    in_tile: Any  # how many a tile has, which may be more than it has room for
    row: jax.Array
    room: int

    def total(self) -> tuple[jax.Array, jax.Array]:
        """Of the row, and whether all found room."""
        num_tiles = self.in_tile.shape[1]
        tiles = jnp.arange(pl.next_power_of_2(num_tiles))
        counts = load(self.in_tile.at[self.row, tiles], mask=tiles < num_tiles, other=0)
        return jnp.sum(counts), jnp.max(counts) <= self.room

    def places(self, lane: jax.Array, *, unrolls: bool) -> tuple[jax.Array, jax.Array]:
        """Return where the candidates of these numbers are, those of a tile after those of the tile
        before, and which of them there are.

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
        """Those at some places; -inf elsewhere."""
        return load(self.logits.at[self.row, at], mask=is_there, other=-jnp.inf)

    def exclude(self, at: jax.Array, is_there: jax.Array, least: jax.Array, out: Any) -> None:
        """Of those at some places, write -inf for the ones below a key."""
        x = load(self.logits.at[self.row, at], mask=is_there, other=jnp.inf)
        # In interpret mode masked lanes store the old value; they point past the end of the row.
        token = load(self.tokens.at[self.row, at], mask=is_there, other=out.shape[1])
        lowest = jnp.full(at.shape, -jnp.inf)
        store(out.at[self.row, token], lowest, mask=is_there & (ordered(x) < least))
