"""The candidates of a row.

A row's threshold is the smallest logit that truncation keeps. Candidates are the logits that are
not below a known lower bound of the threshold.
"""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton_call import load, store
from pallas_kernels.truncation.order import ordered


class RowCandidates(NamedTuple):
    """The logits of a row that truncation may keep. The arrays have `room` entries for each tile.

    The i-th candidate of tile t is at index t * `room` + i.
    """

    logits: Any
    tokens: Any
    in_tile: Any  # number of candidates in each tile, which may exceed `room`
    row: jax.Array
    room: int

    def total(self) -> tuple[jax.Array, jax.Array]:
        """Return the number of candidates, and whether no tile has more than `room` candidates."""
        num_tiles = self.in_tile.shape[1]
        tiles = jnp.arange(pl.next_power_of_2(num_tiles))
        counts = load(self.in_tile.at[self.row, tiles], mask=tiles < num_tiles, other=0)
        return jnp.sum(counts), jnp.max(counts) <= self.room

    def places(self, lane: jax.Array, *, unrolls: bool) -> tuple[jax.Array, jax.Array]:
        """Return the indices of some candidates in `logits`, and whether each candidate exists.

        Args:
            lane: the numbers of these candidates. A row's candidates are numbered tile by tile.
            unrolls: whether to load the counts of all tiles at once, which takes more registers.
        """

        def pass_tile(carry, tile):
            end, at = carry
            in_tile = self.in_tile[self.row, tile]
            end += in_tile
            # Lanes from `end` on belong to a later tile, whose room begins after this tile's room.
            return end, at + jnp.where(lane >= end, self.room - in_tile, 0)

        start, num_tiles = (0 * self.row, lane), self.in_tile.shape[1]
        if unrolls:
            end, at = reduce(pass_tile, range(num_tiles), start)
        else:
            end, at = jax.lax.fori_loop(0, num_tiles, lambda i, x: pass_tile(x, i), start)
        return at, lane < end

    def read(self, at: jax.Array, is_there: jax.Array) -> jax.Array:
        """Return the candidates at the indices `at`, or -inf where `is_there` is false."""
        return load(self.logits.at[self.row, at], mask=is_there, other=-jnp.inf)

    def exclude(self, at: jax.Array, is_there: jax.Array, least: jax.Array, out: Any) -> None:
        """Write -inf to `out` for candidates at the indices `at` whose keys are below `least`."""
        x = load(self.logits.at[self.row, at], mask=is_there, other=jnp.inf)
        # In interpret mode masked lanes store the old value; they point past the end of the row.
        token = load(self.tokens.at[self.row, at], mask=is_there, other=out.shape[1])
        lowest = jnp.full(at.shape, -jnp.inf)
        store(out.at[self.row, token], lowest, mask=is_there & (ordered(x) < least))
