"""The Triton kernels of truncation that run one program per row, and their threshold searches.

A row's threshold is the smallest logit that truncation keeps. Candidates are the logits that are
not below a lower bound of the threshold. Thresholds and bounds are keys (see `ordered`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton_call import load, store
from pallas_kernels.truncation.asked import Asked
from pallas_kernels.truncation.candidates import RowCandidates
from pallas_kernels.truncation.order import INFINITE, NUM_BITS, ordered
from pallas_kernels.truncation.search import highest_key, repeat, shared_digits

ROUGH_BITS = 16  # bits of the lower bound of the candidates: all bits of a bf16 logit
STEP_BITS = 2  # bits of the threshold found per read of a row


def bound_kernel(maxima_ref, largest_ref, mass_ref, *refs, vocab_size: int):
    """Write a row's maximum, its sum of weights, and a lower bound of the smallest logit to keep.

    The bound is a key (see `ordered`). If the row's settings exclude no token, the kernel writes
    only the bound 0.
    """
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
        # The maxima of a flat row do not reach the required weight. If all other logits were as
        # large as this one, they would still weigh less than the rest, with room for rounding.
        rest = jnp.maximum(0.99 * (1 - asked.top_p) - 1e-6, 0.0) * total / vocab_size
        is_flat = is_bounded & ~asked.cuts_k
        flat = jnp.where(is_flat, best + asked.temperature * jnp.log(rest), -jnp.inf)
        least = jnp.maximum(jnp.maximum(rough, ordered(flat)), asked.floor(best))
        bound_ref[row] = jnp.maximum(least, jnp.uint32(INFINITE + 1))
        best_ref[row], total_ref[row] = best, total


def select_kernel(
    _, logits_ref, tokens_ref, counts_ref, *refs, vocab_size: int, tile_room: int, few: int
):
    """Find a row's threshold among its candidates, and exclude candidates below the threshold.

    Do nothing if the row has more than `few` candidates, if a tile has no room for its candidates,
    or if neither top_k nor top_p excludes tokens.
    """
    candidates = RowCandidates(logits_ref, tokens_ref, counts_ref, pl.program_id(0), tile_room)
    asked = Asked.read(refs[3:7], candidates.row, vocab_size)
    count, has_room = candidates.total()

    @pl.when((asked.cuts_k | asked.cuts_p) & has_room & (0 < count) & (count <= few))
    def _():
        lane = jnp.arange(few, dtype=jnp.int32)
        at, is_there = candidates.places(lane, unrolls=True)
        least = _select(candidates.read(at, is_there), candidates.row, asked, *refs[:3])
        candidates.exclude(at, is_there, least, refs[-1])


def rest_kernel(
    _,
    logits_ref,
    tokens_ref,
    counts_ref,
    *refs,
    vocab_size: int,
    block: int,
    tile_room: int,
    few: int,
    many: int,
):
    """Truncate a row that has many candidates: find its threshold, and exclude lower candidates.

    `select_kernel` truncates rows that have few candidates. Here, the search takes more registers,
    or reads the candidates again for every few bits of the threshold. If a tile had no room for all
    of its candidates, the search reads the whole row.
    """
    row, num_tiles, out_ref = pl.program_id(0), counts_ref.shape[1], refs[-1]
    candidates = RowCandidates(logits_ref, tokens_ref, counts_ref, row, tile_room)
    asked = Asked.read(refs[3:7], row, vocab_size)
    count, has_room = candidates.total()
    is_asked, known = asked.cuts_k | asked.cuts_p, (row, asked, *refs[:3])

    @pl.when(is_asked & has_room & (few < count))
    def _():
        in_room = jnp.arange(tile_room, dtype=jnp.int32)

        def places(tile):
            return tile * tile_room + in_room, in_room < counts_ref[row, tile]

        def in_registers():
            # Places are computed twice: to keep them would take as many registers again.
            lane = jnp.arange(many, dtype=jnp.int32)
            return _select(candidates.read(*candidates.places(lane, unrolls=False)), *known)

        def in_memory():
            return _search(
                lambda tile: candidates.read(*places(tile)), num_tiles, tile_room, *known
            )

        def exclude(tile, carry):
            candidates.exclude(*places(tile), least, out_ref)
            return carry

        least = jax.lax.cond(count <= many, in_registers, in_memory)
        jax.lax.fori_loop(0, num_tiles, exclude, 0)

    @pl.when(is_asked & ~has_room)
    def _():
        # Only candidates are left in the row.
        num_blocks, column = pl.cdiv(vocab_size, block), jnp.arange(block)

        def read(i):
            at = i * block + column
            return load(out_ref.at[row, at], mask=at < vocab_size, other=-jnp.inf)

        def exclude(i, carry):
            at, x = i * block + column, read(i)
            kept = jnp.where(ordered(x) >= least, x, -jnp.inf)
            store(out_ref.at[row, at], kept, mask=at < vocab_size)
            return carry

        least = _search(read, num_blocks, block, *known)
        jax.lax.fori_loop(0, num_blocks, exclude, 0)


def _select(x, row, asked: Asked, bound_ref, best_ref, total_ref) -> jax.Array:
    """Return the threshold of a row, given its candidates x, which are in registers."""
    bound, best, total = (ref[row] for ref in (bound_ref, best_ref, total_ref))
    keys, weights = ordered(x), asked.weigh(x, best)
    known = shared_digits(bound, ordered(best), 1)

    def find(counts, wanted, is_asked):
        return highest_key(keys, 1.0 if counts else weights, wanted, NUM_BITS, is_asked, known)

    def mass(key):
        return jnp.sum(jnp.where(keys >= key, weights, 0.0))

    return _threshold(asked, best, bound, total, find, mass)


def _search(
    read: Callable, num_blocks: int, size: int, row, asked: Asked, bound_ref, best_ref, total_ref
) -> jax.Array:
    """Return the threshold of a row. `read(i)` returns the i-th block [size] of its candidates.

    The blocks are read again for every few bits of the threshold.
    """
    bound, best, total = (ref[row] for ref in (bound_ref, best_ref, total_ref))
    known, num_known = shared_digits(bound, ordered(best), STEP_BITS)

    def through(counts, trials):
        def add(i, sums):
            x = read(i)
            keys, weights = ordered(x), 1.0 if counts else asked.weigh(x, best)
            parts = [jnp.where(keys >= trial, weights, 0.0) for trial in trials]
            return tuple(a + b for a, b in zip(sums, parts, strict=True))

        zero = tuple(jnp.zeros(size, jnp.float32) for _ in trials)
        return [jnp.sum(x) for x in jax.lax.fori_loop(0, num_blocks, add, zero)]

    def find(counts, wanted, is_asked):
        def refine(i, key):
            shift = (NUM_BITS - STEP_BITS * (i + 1)).astype(jnp.uint32)
            trials = [key | (jnp.uint32(j) << shift) for j in range(1, 2**STEP_BITS)]
            for trial, weight in zip(trials, through(counts, trials), strict=True):
                key = jnp.where(weight >= wanted, trial, key)
            return key

        return repeat(num_known, NUM_BITS // STEP_BITS, refine, known, is_asked)

    def mass(key):
        return through(False, [key])[0]

    return _threshold(asked, best, bound, total, find, mass)


def _threshold(asked: Asked, best, bound, total, find: Callable, mass: Callable) -> jax.Array:
    """Return the threshold of a row under top-k, top-p and min-p together.

    `find` returns the threshold of top-k or top-p alone. `mass` returns the sum of the weights that
    a threshold keeps.
    """

    def cut(counts, wanted, is_asked):
        key = find(counts, wanted, is_asked)
        return jnp.where(is_asked, jnp.maximum(key, bound), jnp.uint32(0))

    left = cut(True, asked.top_k.astype(jnp.float32), asked.cuts_k)
    left = jnp.maximum(left, asked.floor(best))
    some_left = jnp.where(asked.cuts_k | asked.cuts_min, mass(left), total)
    return jnp.maximum(left, cut(False, asked.top_p * some_left, asked.cuts_p))
