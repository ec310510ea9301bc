"""Truncation in five Triton kernels. Two of them read the logits, with several programs per row.

1. `summarise` reads each tile of a row. It writes the maxima of the tile's columns, which have a
   few logits each, and the sum of the tile's probabilities.
2. `bound` finds a lower bound of each row's threshold from the maxima. For top_k, the bound is the
   k-th largest maximum, without its last bits. So at least k logits reach the bound, and not many
   more than k. For top_p, the maxima that reach the bound have at least the mass that top_p keeps.
   In a flat row, even all maxima together may have less mass. The bound is then so low that top_p
   excludes all logits below it. The bound is never below the smallest logit that min_p keeps.
3. `mask` reads the tiles again, and writes the result as if the bound were the threshold. It
   gathers the candidates, which are the logits that reach the bound.
4. `select` finds the threshold among a row's candidates in registers, if there are few candidates.
   It overwrites the candidates below the threshold.
5. `rest` does the same if there are more candidates (a flat distribution, a large k). It uses more
   registers. If the candidates do not fit in registers, `rest` reads them again for every few bits
   of the threshold. If a tile had no room for its candidates, `rest` reads the whole row.
"""

from dataclasses import dataclass
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.triton_call import load, store, triton_call
from pallas_kernels.truncation.asked import LOG2_E, Asked
from pallas_kernels.truncation.order import ordered
from pallas_kernels.truncation.rows import bound_kernel, rest_kernel, select_kernel

MAX_ELEMENTS = 2**31  # offsets into an array are i32


@dataclass(frozen=True)
class TruncationTuning:
    """Tuning of the truncation kernels.

    The fields are sizes of tiles and of candidate buffers (powers of two), and warps per program.
    """

    tile: int = 8192  # logits per tile; each tile has a program, so a row of 152k has 19 programs
    columns: int = 512  # columns per tile, for maxima; a thread loads four logits at a time
    summarise_warps: int = 4
    mask_columns: int = 1024  # per tile in `mask`, with fewer rows because it needs more registers
    mask_warps: int = 8
    tile_room: int = 2048  # candidates per tile: in some models, frequent tokens share a few tiles
    few: int = 2048  # candidates that `select` holds in registers, so that two programs fit
    many: int = 16384  # candidates that `rest` holds in registers
    bound_warps: int = 8  # per row; they hold the row's maxima, and two rows share the registers
    row_warps: int = 16


DEFAULT = TruncationTuning()


def truncate_triton(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    config: TruncationTuning = DEFAULT,
    interpret: bool = False,
) -> jax.Array:
    """See `truncate`.

    Raises:
        UnsupportedError: logits are not float32, or have too many elements.
    """
    num_rows, vocab_size = logits.shape
    if logits.dtype != jnp.float32:
        raise UnsupportedError(f"logits must be float32; got {logits.dtype}")
    if logits.size >= MAX_ELEMENTS:
        raise UnsupportedError(f"logits must have less than 2^31 elements; got {logits.size}")
    whole = max(pl.next_power_of_2(vocab_size), 16)
    tile, columns = min(config.tile, whole), min(config.columns, whole)
    mask_columns = min(config.mask_columns, whole)
    num_tiles = pl.cdiv(vocab_size, tile)
    tile_room = min(config.tile_room, tile)
    size = num_tiles * tile_room
    asked = temperature, top_k.astype(jnp.int32), top_p, min_p

    def call(kernel, operands, outputs, *, num_warps, aliases=None, **sizes):
        is_tiled, name = "columns" in sizes, kernel.__name__.strip("_").removesuffix("_kernel")
        return triton_call(
            partial(kernel, vocab_size=vocab_size, **sizes),
            [*operands, *asked],
            [jax.ShapeDtypeStruct((num_rows, *shape), dtype) for dtype, *shape in outputs],
            name=f"truncation_{name}",
            grid=(num_rows, num_tiles) if is_tiled else (num_rows,),
            num_warps=num_warps,
            aliases=aliases,
            interpret=interpret,
        )

    f32, i32, u32 = jnp.float32, jnp.int32, jnp.uint32
    # The columns' maxima; each tile's largest logit, and sum of exp((x - largest) / temperature).
    summary = [(f32, num_tiles * columns), (f32, num_tiles), (f32, num_tiles)]
    sizes = {"tile": tile, "columns": columns, "num_warps": config.summarise_warps}
    summary = call(_summarise_kernel, [logits], summary, **sizes)
    # For each row, the bound as a key, the largest logit, and the sum.
    bounds = call(bound_kernel, summary, [(u32,), (f32,), (f32,)], num_warps=config.bound_warps)
    # The logits; candidates, their tokens, and their number by tile, which may be more than fit.
    result = [(f32, vocab_size), (f32, size), (i32, size), (i32, num_tiles)]
    sizes = {"tile": tile, "columns": mask_columns, "num_warps": config.mask_warps}
    masked, *candidates, counts = call(
        _mask_kernel, [logits, bounds[0]], result, tile_room=tile_room, **sizes
    )
    others = [*candidates, counts, *bounds]
    in_place = {"outputs": result[:1], "aliases": {0: 0}, "num_warps": config.row_warps}
    sizes = {"tile_room": tile_room, "few": config.few, **in_place}
    (selected,) = call(select_kernel, [masked, *others], **sizes)
    (truncated,) = call(rest_kernel, [selected, *others], many=config.many, block=tile, **sizes)
    return truncated


def _parts(tile: jax.Array, *, size: int, columns: int) -> list[jax.Array]:
    """Return the token ids of a tile, as a list of arrays of `columns` ids."""
    column = tile * size + jnp.arange(columns)
    return [column + i * columns for i in range(size // columns)]


def _summarise_kernel(logits_ref, *refs, vocab_size: int, tile: int, columns: int):
    row, number = pl.program_id(0), pl.program_id(1)
    asked = Asked.read(refs[:4], row, vocab_size)
    maxima_ref, largest_ref, mass_ref = refs[4:]

    @pl.when(asked.cuts)
    def _():
        rate = LOG2_E / asked.temperature
        parts = [
            load(logits_ref.at[row, at], mask=at < vocab_size, other=-jnp.inf)
            for at in _parts(number, size=tile, columns=columns)
        ]
        maxima = reduce(jnp.maximum, parts)
        # Finite, because differences of -inf are NaN.
        largest = jnp.maximum(jnp.max(maxima), jnp.finfo(jnp.float32).min)
        weights = [jnp.exp2((x - largest) * rate) for x in parts]
        maxima_ref[row, pl.ds(number * columns, columns)] = maxima
        largest_ref[row, number] = largest
        mass_ref[row, number] = jnp.sum(reduce(jnp.add, weights))


def _mask_kernel(
    logits_ref,
    bound_ref,
    *refs,
    vocab_size: int,
    tile: int,
    columns: int,
    tile_room: int,
):
    # Start with the last row: the cache still holds the rows that `summarise` read last.
    row, number = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1)
    asked = Asked.read(refs[:4], row, vocab_size)
    out_ref, candidates_ref, tokens_ref, count_ref = refs[4:]
    bound = bound_ref[row]
    tokens = _parts(number, size=tile, columns=columns)
    parts = [load(logits_ref.at[row, at], mask=at < vocab_size, other=-jnp.inf) for at in tokens]
    kept = [ordered(x) >= bound for x in parts]
    for at, x, is_kept in zip(tokens, parts, kept, strict=True):
        store(out_ref.at[row, at], jnp.where(is_kept, x, -jnp.inf), mask=at < vocab_size)

    @pl.when(asked.cuts_k | asked.cuts_p)
    def _():
        in_column = reduce(jnp.add, [is_kept.astype(jnp.int32) for is_kept in kept])
        place = jnp.cumsum(in_column) - in_column  # of each column's first candidate
        count_ref[row, number] = jnp.sum(in_column)

        def put(i, carry):
            """Store the i-th candidate of each column that has more than i candidates."""
            x, token, seen = parts[0], tokens[0], jnp.zeros_like(in_column)
            for at, other, is_kept in zip(tokens, parts, kept, strict=True):
                is_next = is_kept & (seen == i)
                x, token = jnp.where(is_next, other, x), jnp.where(is_next, at, token)
                seen += is_kept.astype(jnp.int32)
            fits = (in_column > i) & (place + i < tile_room)
            # In interpret mode masked lanes store the old value; they point past the row's end.
            to = jnp.where(fits, number * tile_room + place + i, candidates_ref.shape[1])
            store(candidates_ref.at[row, to], x, mask=fits)
            store(tokens_ref.at[row, to], token, mask=fits)
            return carry

        jax.lax.fori_loop(0, jnp.max(in_column), put, 0)
