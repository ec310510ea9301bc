"""The Triton kernels of truncation that have a program per row, and what they have in registers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton_call import load, store
from pallas_kernels.truncation.asked import Asked
from pallas_kernels.truncation.order import INFINITE, NUM_BITS, ordered
from pallas_kernels.truncation.search import highest_key, repeat, zero_key

ROUGH_BITS = 16  # bits of the lower bound of the candidates: all bits of a bf16 logit
STEP_BITS = 2  # bits of the threshold found per read of a row


def bound_kernel(maxima_ref, largest_ref, mass_ref, *refs, vocab_size: int):
    """Find a key that is not above the row's threshold; 0 if nothing is to be excluded."""
    row = pl.program_id(0)
    asked = Asked.read(refs[:4], row, vocab_size)
    bound_ref, best_ref, total_ref = refs[4:]

    def read(ref, other):
        at, count = jnp.arange(pl.next_power_of_2(ref.shape[1])), ref.shape[1]
        return load(ref.at[row, at], mask=at < count, other=other)

    @pl.when(~asked.cuts)
    def _():
        bound_ref[row] = jnp.uint32(0)

    @pl.when(asked.cuts)
    def _():
        largest, maxima = read(largest_ref, jnp.finfo(jnp.float32).min), read(maxima_ref, -jnp.inf)
        best = jnp.max(largest)
        total = jnp.sum(read(mass_ref, 0.0) * asked.weigh(largest, best))
        # Required weight at or above the bound; not valid for top_p if min_p applies before it.
        wanted = jnp.where(asked.cuts_k, asked.top_k.astype(jnp.float32), asked.top_p * total)
        weights = jnp.where(asked.cuts_k, 1.0, asked.weigh(maxima, best))
        is_bounded = asked.cuts_k | (asked.cuts_p & ~asked.cuts_min)
        rough = highest_key(ordered(maxima), weights, wanted, ROUGH_BITS, is_bounded)
        least = jnp.maximum(rough, asked.floor(best))
        bound_ref[row] = jnp.maximum(least, jnp.uint32(INFINITE + 1))
        best_ref[row], total_ref[row] = best, total


def select_kernel(
    _,
    candidates_ref,
    tokens_ref,
    count_ref,
    bound_ref,
    best_ref,
    total_ref,
    *refs,
    vocab_size: int,
    tile_candidates: int,
    max_candidates: int,
):
    """Exclude the candidates below the row's threshold, if they all fit in registers."""
    row = pl.program_id(0)
    asked, out_ref = Asked.read(refs[:4], row, vocab_size), refs[4]
    count, fits = _count(count_ref, row, tile_candidates, max_candidates)

    @pl.when((asked.cuts_k | asked.cuts_p) & fits & (count > 0))
    def _():
        best, bound, total = best_ref[row], bound_ref[row], total_ref[row]
        # The candidates of a tile follow those of the tile before.
        width = candidates_ref.shape[1] // count_ref.shape[1]  # of a tile's room
        lane = jnp.arange(max_candidates, dtype=jnp.int32)
        end, at = 0 * row, lane
        for tile in range(count_ref.shape[1]):
            in_tile = count_ref[row, tile]
            end += in_tile
            # The lanes beyond lie in a later tile's room, which begins after the rest of this one.
            at += jnp.where(lane >= end, width - in_tile, 0)
        is_there = lane < end
        x = load(candidates_ref.at[row, at], mask=is_there, other=-jnp.inf)
        keys = ordered(x)

        def find(counts, wanted, is_asked):
            weights = is_there.astype(jnp.float32) if counts else asked.weigh(x, best)
            return highest_key(keys, weights, wanted, NUM_BITS, is_asked)

        def mass(key):
            return jnp.sum(jnp.where(keys >= key, asked.weigh(x, best), 0.0))

        least = _threshold(asked, best, bound, total, find, mass)
        # In interpret mode masked lanes store the old value; they point past the end of the row.
        token = load(tokens_ref.at[row, at], mask=is_there, other=vocab_size)
        kept = jnp.where(keys >= least, x, -jnp.inf)
        store(out_ref.at[row, token], kept, mask=is_there)


def reread_kernel(
    _,
    count_ref,
    bound_ref,
    best_ref,
    total_ref,
    *refs,
    vocab_size: int,
    block: int,
    tile_candidates: int,
    max_candidates: int,
):
    """Do the same for the rows with more, by reading them for every few bits of the threshold.

    Only candidates are left in them.
    """
    row = pl.program_id(0)
    asked, out_ref = Asked.read(refs[:4], row, vocab_size), refs[4]
    fits = _count(count_ref, row, tile_candidates, max_candidates)[1]
    num_blocks, column = pl.cdiv(vocab_size, block), jnp.arange(block)

    def read(i):
        at = i * block + column
        return at, load(out_ref.at[row, at], mask=at < vocab_size, other=-jnp.inf)

    @pl.when((asked.cuts_k | asked.cuts_p) & ~fits)
    def _():
        best, bound, total = best_ref[row], bound_ref[row], total_ref[row]

        def through(counts, trials):
            def add(i, sums):
                _, x = read(i)
                keys, weights = ordered(x), 1.0 if counts else asked.weigh(x, best)
                parts = [jnp.where(keys >= trial, weights, 0.0) for trial in trials]
                return tuple(a + b for a, b in zip(sums, parts, strict=True))

            zero = tuple(jnp.zeros(block, jnp.float32) for _ in trials)
            return [jnp.sum(x) for x in jax.lax.fori_loop(0, num_blocks, add, zero)]

        def find(counts, wanted, is_asked):
            def refine(i, key):
                shift = (NUM_BITS - STEP_BITS * (i + 1)).astype(jnp.uint32)
                trials = [key | (jnp.uint32(j) << shift) for j in range(1, 2**STEP_BITS)]
                for trial, weight in zip(trials, through(counts, trials), strict=True):
                    key = jnp.where(weight >= wanted, trial, key)
                return key

            return repeat(NUM_BITS // STEP_BITS, refine, zero_key(is_asked), is_asked)

        def mass(key):
            return through(False, [key])[0]

        least = _threshold(asked, best, bound, total, find, mass)

        def exclude(i, carry):
            at, x = read(i)
            kept = jnp.where(ordered(x) >= least, x, -jnp.inf)
            store(out_ref.at[row, at], kept, mask=at < vocab_size)
            return carry

        jax.lax.fori_loop(0, num_blocks, exclude, 0)


def _count(count_ref, row, tile_candidates: int, max_candidates: int):
    """The number of a row's candidates, and whether there is room for all."""
    num_tiles = count_ref.shape[1]
    tiles = jnp.arange(pl.next_power_of_2(num_tiles))
    counts = load(count_ref.at[row, tiles], mask=tiles < num_tiles, other=0)
    count = jnp.sum(counts)
    return count, (jnp.max(counts) <= tile_candidates) & (count <= max_candidates)


def _threshold(asked: Asked, best, bound, total, find: Callable, mass: Callable) -> jax.Array:
    """The row's key: `find` gives that of a cut, `mass` what a key keeps."""

    def cut(counts, wanted, is_asked):
        key = find(counts, wanted, is_asked)
        return jnp.where(is_asked, jnp.maximum(key, bound), jnp.uint32(0))

    left = cut(True, asked.top_k.astype(jnp.float32), asked.cuts_k)
    left = jnp.maximum(left, asked.floor(best))
    some_left = jnp.where(asked.cuts_k | asked.cuts_min, mass(left), total)
    return jnp.maximum(left, cut(False, asked.top_p * some_left, asked.cuts_p))
