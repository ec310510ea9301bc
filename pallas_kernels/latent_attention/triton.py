"""Attention over latents in two Triton kernels.

The first is a flash kernel, in which several programs may divide a request's context. The second
kernel combines their results.

A program of the first kernel computes up to `block_rows` of a request's T H rows. It reads every
`num_splits`-th block of `block_tokens` tokens in the request's context. An entry is read once, and
used both as key and as value. As in paged attention, a row's bits depend neither on other requests
nor on other rows of its request.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.capability import compute_capability
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.page_formats import PAGE_FORMATS, why_no_kernel
from pallas_kernels.quantisation import zero_of
from pallas_kernels.triton_call import dot, load, store, triton_call

RANKS = (64, 128, 256, 512)
ROTATED = (16, 32, 64, 128)
PAGE_SIZES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float32")

LOG2_E = math.log2(math.e)
UNSEEN = -1e30  # maximum of no scores; finite, so that differences are never NaN
NOWHERE = 2**30  # a column that no row attends to
NUM_SMS = 132  # multiprocessors of an H100 or H200
MIN_TOKENS = 2  # per split and row; with fewer, partial results exceed the entries read
MAX_SPLITS = 32  # the combine kernel keeps a row's partial results [splits, rank] in registers


@dataclass(frozen=True)
class LatentTuning:
    """Tile sizes and launch parameters of the attention kernel."""

    block_rows: int  # query rows per program, out of T H per request
    block_tokens: int  # entries per iteration
    num_splits: int  # programs that divide the context of a block of rows
    num_warps: int
    num_stages: int


# Bytes per element of q and of the pool -> block_rows: (block_tokens, num_warps, num_stages), for a
# rank of 512.
# Blocks of 128 rows are impossible: the f32 accumulator [block_rows, rank] and the queries would
# not fit in the registers and the shared memory.
TILES = {
    (2, 2): {16: (32, 4, 3), 32: (32, 8, 3), 64: (16, 8, 5)},  # 32 tokens would spill at 64 rows
    (2, 1): {16: (32, 4, 3), 32: (32, 8, 3)},  # converting numbers would spill at 64 rows
    (4, 4): {16: (16, 8, 2), 32: (16, 8, 2)},
}


def choose_config(
    batch: int,
    num_rows: int,
    num_heads: int,
    context: int,
    dtype: jnp.dtype,
    pool_dtype: jnp.dtype,
) -> LatentTuning:
    """Return the tiling for `num_rows` tokens per request, each with a query row per head.

    The tokens attend to up to `context` tokens.
    """
    tiles, rows = TILES[dtype.itemsize, pool_dtype.itemsize], num_rows * num_heads
    block_rows = min((size for size in tiles if size >= rows), default=max(tiles))
    block_tokens, num_warps, num_stages = tiles[block_rows]
    programs = batch * -(-rows // block_rows)
    max_splits = min(-(-context // (MIN_TOKENS * block_rows)), MAX_SPLITS)
    # A second kernel would cost more than leaving an eighth of the GPU idle.
    is_full = 8 * programs >= 7 * NUM_SMS
    num_splits = 1 if is_full else max(1, min(NUM_SMS // programs, max_splits))
    return LatentTuning(block_rows, block_tokens, num_splits, num_warps, num_stages)


def latent_attention_triton(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    rank: int,
    scale: float,
    scales: jax.Array | None = None,
    config: LatentTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `latent_attention`. `config` overrides the result of `choose_config`.

    Raises:
        UnsupportedError: the kernel does not support an argument.
    """
    if reason := why_no_kernel(pool, None if interpret else compute_capability()):
        raise UnsupportedError(reason)
    _check_supported(q, pool, rank)
    batch, num_rows, num_heads, _ = q.shape
    if config is None:
        capacity = page_table.shape[1] * pool.shape[2]
        config = choose_config(batch, num_rows, num_heads, capacity, q.dtype, pool.dtype)
    # Rows and heads are one axis, so that the kernel computes fewer addresses.
    q = q.reshape(batch, num_rows * num_heads, -1)
    out = jax.ShapeDtypeStruct((*q.shape[:2], rank), q.dtype)
    attended = [out]
    if config.num_splits > 1:
        partials = (*q.shape[:2], config.num_splits)
        statistic = jax.ShapeDtypeStruct(partials, jnp.float32)
        attended = [jax.ShapeDtypeStruct((*partials, rank), jnp.float32), statistic, statistic]
    operands = [q, pool, jnp.asarray(layer, jnp.int32).reshape(1), page_table, positions]
    attended = triton_call(
        functools.partial(
            _attention_kernel,
            num_heads=num_heads,
            is_scaled=scales is not None,
            rank=rank,
            scale=scale * LOG2_E,
            config=config,
        ),
        operands if scales is None else [*operands, scales],
        attended,
        name="latent_attention",
        grid=(pl.cdiv(q.shape[1], config.block_rows), batch, config.num_splits),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    shape = batch, num_rows, num_heads, rank
    if config.num_splits == 1:
        return attended[0].reshape(shape)
    width = pl.next_power_of_2(config.num_splits)
    (combined,) = triton_call(
        functools.partial(_combine_kernel, width=width),
        attended,
        [out],
        name="latent_attention_combine",
        grid=q.shape[:2][::-1],
        num_warps=min(8, max(1, width * rank // 1024)),
        interpret=interpret,
    )
    return combined.reshape(shape)


def _check_supported(q: jax.Array, pool: jax.Array, rank: int) -> None:
    # As in paged attention, converting 8 bits to f32 would spill.
    formats = {one.dtype for one in PAGE_FORMATS.values()} if q.dtype == jnp.bfloat16 else ()
    supported = {
        "rank": (rank, RANKS),
        "rotated dimensions": (q.shape[3] - rank, ROTATED),
        "page_size": (pool.shape[2], PAGE_SIZES),
        "dtype of q": (q.dtype.name, DTYPES),
        "dtype of the pool": (pool.dtype.name, (q.dtype.name, *sorted(formats))),
    }
    for name, (value, values) in supported.items():
        if value not in values:
            raise UnsupportedError(
                f"{name} {value}: the Triton kernel takes {', '.join(map(str, values))}"
            )


def _attention_kernel(
    q_ref,  # [B, T H, E]
    pool_ref,  # [L, pages, page_size, E]
    layer_ref,  # [1]
    page_table_ref,  # [B, P]
    positions_ref,  # [B, T]
    *refs,  # optional f32 scales; then the outputs
    num_heads: int,
    is_scaled: bool,
    rank: int,
    scale: float,  # includes log2(e): exp2 is the hardware's instruction
    config: LatentTuning,
):
    scales_ref, *out_refs = refs if is_scaled else (None, *refs)
    (num_rows, width), page_size = q_ref.shape[1:], pool_ref.shape[2]
    has_token_scales = scales_ref is not None and len(scales_ref.shape) > 2
    request, split = pl.program_id(1), pl.program_id(2)
    layer = layer_ref[0]

    row = pl.program_id(0) * config.block_rows + jnp.arange(config.block_rows, dtype=jnp.int32)
    exists = row < num_rows
    # A tile's sides are powers of two, so latent and rotated part are separate tiles.
    latent = jnp.arange(rank, dtype=jnp.int32)[None]
    rotated = rank + jnp.arange(width - rank, dtype=jnp.int32)[None]

    def load_queries(element):
        mask = jnp.broadcast_to(exists[:, None], (config.block_rows, element.shape[1]))
        return load(q_ref.at[request, row[:, None], element], mask=mask, other=0.0)

    q, q_rotated = load_queries(latent), load_queries(rotated)
    t = jax.lax.div(row, num_heads)
    last = load(positions_ref.at[request, t], mask=exists, other=-1)  # [R], last visible position
    end = jnp.minimum(jnp.max(last) + 1, page_table_ref.shape[1] * page_size)

    def block(i, carry):
        out, maximum, total = carry
        column = (i * config.num_splits + split) * config.block_tokens
        column += jnp.arange(config.block_tokens, dtype=jnp.int32)  # [C]
        page_index = jax.lax.div(column, page_size)
        page = load(page_table_ref.at[request, page_index], mask=column < end, other=-1)
        used = page >= 0
        within = jax.lax.rem(column, page_size)
        offset = within[:, None]

        def load_entries(element):
            mask = jnp.broadcast_to(used[:, None], (config.block_tokens, element.shape[1]))
            at = (layer, page[:, None], offset, element)
            return load(pool_ref.at[at], mask=mask, other=zero_of(pool_ref.dtype)).astype(q.dtype)

        def scaled(x, part):  # x [R, C] times the scales of a part of the entries
            if scales_ref is None or not has_token_scales:
                return x if scales_ref is None else x * scales_ref[layer, part]
            at = (layer, page, within, jnp.int32(part))
            return x * load(scales_ref.at[at], mask=used, other=0.0)[None]

        entries = load_entries(latent)  # [C, rank]
        # By default, f32 would be multiplied as tf32.
        scores = scaled(dot(q, entries, trans_b=True, precision="highest"), 0)
        rope = load_entries(rotated)
        scores += scaled(dot(q_rotated, rope, trans_b=True, precision="highest"), 1)
        column = jnp.where(used, column, NOWHERE)[None]
        scores = jnp.where(column <= last[:, None], scores * scale, -jnp.inf)  # [R, C]
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new_maximum[:, None])
        decay = jnp.exp2(maximum - new_maximum)
        out = out * decay[:, None]
        out += dot(scaled(weights, 0).astype(q.dtype), entries, precision="highest")
        return out, new_maximum, total * decay + jnp.sum(weights, axis=1)

    carry = (
        jnp.zeros((config.block_rows, rank), jnp.float32),
        jnp.full((config.block_rows,), UNSEEN, jnp.float32),
        jnp.zeros((config.block_rows,), jnp.float32),
    )
    # Blocks split, split + num_splits, ..., up to the block of `end` - 1.
    end_block = pl.cdiv(end, config.block_tokens)
    stop = pl.cdiv(jnp.maximum(end_block - split, 0), config.num_splits)
    out, maximum, total = jax.lax.fori_loop(0, stop, block, carry)

    _store(out_refs, (request, row, split), latent, exists, out, maximum, total, q.dtype)


def _store(out_refs, where, latent, exists, out, maximum, total, dtype):
    """Write the outputs of rows or, if there are several `out_refs`, partial results.

    A partial result is for one part of a row's context. It consists of the weighted sum of the
    latents, the maximum score, and the sum of the weights.
    """
    request, row, split = where
    rows = row[:, None]
    if len(out_refs) == 1:
        out = out / jnp.where(total > 0, total, 1.0)[:, None]
        mask = jnp.broadcast_to(exists[:, None], out.shape)
        store(out_refs[0].at[request, rows, latent], out.astype(dtype), mask=mask)
        return
    # For a split without visible tokens, the combine kernel reads only the statistics.
    mask = jnp.broadcast_to((exists & (total > 0))[:, None], out.shape)
    store(out_refs[0].at[request, rows, split, latent], out, mask=mask)
    for ref, statistic in zip(out_refs[1:], (maximum, total), strict=True):
        store(ref.at[request, row, split], statistic, mask=exists)


def _combine_kernel(partial_ref, maximum_ref, total_ref, out_ref, *, width: int):
    """Combine the partial results [rank] for all parts of a row's context; write the row's output.

    A partial result is weighted by 2^(m - M), where m is the part's maximum score, and M is the
    maximum of all parts. These scores already have a factor of log2(e).
    """
    row, request = pl.program_id(0), pl.program_id(1)
    num_splits, rank = partial_ref.shape[2:]
    split = jnp.arange(width, dtype=jnp.int32)
    exists = split < num_splits
    where = (request, row, split)
    maximum = load(maximum_ref.at[where], mask=exists, other=UNSEEN)
    total = load(total_ref.at[where], mask=exists, other=0.0)
    element = jnp.arange(rank, dtype=jnp.int32)[None]
    mask = jnp.broadcast_to((total > 0)[:, None], (width, rank))
    partial = load(partial_ref.at[request, row, split[:, None], element], mask=mask, other=0.0)
    weights = jnp.exp2(maximum - jnp.max(maximum))
    total = jnp.sum(total * weights)
    out = jnp.sum(partial * weights[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
    out_ref[request, row] = out.astype(out_ref.dtype)
