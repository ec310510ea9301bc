"""Paged attention in two Triton kernels.

The first is a flash kernel, in which several programs may divide a request's context. The second
kernel combines their results.

With T tokens per request and G query heads per key head, each request and key head have T G rows.
A program of the first kernel computes up to `block_rows` of them. It reads every `num_splits`-th
block of `block_tokens` tokens in the request's context. So a block's number alone determines which
program processes the block, and in which order results are added. Blocks that a row does not attend
to add exactly 0. A row's bits thus depend neither on other requests nor on other rows of its
request.
"""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.capability import compute_capability
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.page_formats import PAGE_FORMATS, why_no_kernel
from pallas_kernels.paged_attention.tuning import AttentionTuning, choose_config
from pallas_kernels.quantisation import zero_of
from pallas_kernels.triton_call import dot, load, store, triton_call

DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float32")

LOG2_E = math.log2(math.e)
UNSEEN = -1e30  # maximum of no scores; finite, so that differences are never NaN
NOWHERE = 2**30  # a column that no row attends to


def paged_attention_triton(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    window: int | None = None,
    origins: jax.Array | None = None,
    soft_cap: float | None = None,
    scales: jax.Array | None = None,
    sinks: jax.Array | None = None,
    returns_lse: bool = False,
    config: AttentionTuning | None = None,
    interpret: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `paged_attention`. `config` overrides the result of `choose_config`.

    Raises:
        UnsupportedError: the kernel does not support an argument.
    """
    if reason := why_no_kernel(kv, None if interpret else compute_capability()):
        raise UnsupportedError(reason)
    _check_supported(q, kv)
    batch, num_rows, num_heads, dim = q.shape
    page_size, _, num_kv_heads = kv.shape[2:5]
    if config is None:
        capacity = page_table.shape[1] * page_size
        seen = capacity if window is None else min(capacity, window + num_rows)
        config = choose_config(batch, num_rows, num_heads, num_kv_heads, dim, seen, q.dtype)
    if returns_lse:
        config = replace(config, num_splits=1)
    operands = [q, kv, jnp.asarray(layer, jnp.int32).reshape(1), page_table, positions]
    operands += [x for x in (origins, scales, sinks) if x is not None]
    attended = [jax.ShapeDtypeStruct(q.shape, jnp.float32 if returns_lse else q.dtype)]
    if returns_lse:
        attended.append(jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))
    if config.num_splits > 1:
        partials = (batch, num_rows, num_heads, config.num_splits)
        statistic = jax.ShapeDtypeStruct(partials, jnp.float32)
        attended = [jax.ShapeDtypeStruct((*partials, dim), jnp.float32), statistic, statistic]
    num_blocks = pl.cdiv(num_rows * num_heads // num_kv_heads, config.block_rows)
    attended = triton_call(
        functools.partial(
            _attention_kernel,
            window=window,
            soft_cap=soft_cap,
            has_origins=origins is not None,
            is_scaled=scales is not None,
            has_sinks=sinks is not None,
            config=config,
        ),
        operands,
        attended,
        # The name shows the window in profiles and in reports of compiled programs.
        name="paged_attention" if window is None else f"paged_attention_window_{window}",
        # Adjacent programs of the grid run together: row blocks that read the same keys, then heads
        # with adjacent keys.
        grid=(num_blocks * num_kv_heads, batch, config.num_splits),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    if config.num_splits == 1:
        return attended if returns_lse else attended[0]
    width = pl.next_power_of_2(config.num_splits)
    (out,) = triton_call(
        functools.partial(_combine_kernel, width=width),
        attended,
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        name="paged_attention_combine",
        grid=(num_heads, num_rows, batch),
        # 32 elements of the partial results per thread: enough loads in flight, no spills.
        num_warps=min(8, max(1, width * dim // 1024)),
        interpret=interpret,
    )
    return out


def _check_supported(q: jax.Array, kv: jax.Array) -> None:
    # Converting 8 bits to f32 would spill: a thread of f32 tiles already holds whole rows of D.
    formats = {one.dtype for one in PAGE_FORMATS.values()} if q.dtype == jnp.bfloat16 else ()
    stored = q.dtype.name, *sorted(formats)
    supported = {
        "head dimension D": (q.shape[3], DIMS),
        "page_size": (kv.shape[2], PAGE_SIZES),
        "dtype of q": (q.dtype.name, DTYPES),
        f"dtype of kv with q in {q.dtype.name}:": (kv.dtype.name, stored),
    }
    for name, (value, values) in supported.items():
        if value not in values:
            raise UnsupportedError(
                f"{name} {value}: the Triton kernel takes {', '.join(map(str, values))}"
            )


def _attention_kernel(
    q_ref,  # [B, T, H, D]
    kv_ref,  # [L, pages, page_size, 2, H_kv, D]
    layer_ref,  # [1]
    page_table_ref,  # [B, P]
    positions_ref,  # [B, T]
    *refs,  # optional [B, T] origins, f32 scales, [H] sinks; then the outputs
    window: int | None,
    soft_cap: float | None,
    has_origins: bool,
    is_scaled: bool,
    has_sinks: bool,
    config: AttentionTuning,
):
    origins_ref, *refs = refs if has_origins else (None, *refs)
    scale_ref, *refs = refs if is_scaled else (None, *refs)
    sinks_ref, *out_refs = refs if has_sinks else (None, *refs)
    num_rows, num_heads, dim = q_ref.shape[1:]
    page_size, _, num_kv_heads = kv_ref.shape[2:5]
    group = num_heads // num_kv_heads
    num_blocks = pl.cdiv(num_rows * group, config.block_rows)
    kv_head = jax.lax.div(pl.program_id(0), num_blocks)
    row_block = jax.lax.rem(pl.program_id(0), num_blocks)
    request, split = pl.program_id(1), pl.program_id(2)
    layer = layer_ref[0]

    row = row_block * config.block_rows + jnp.arange(config.block_rows, dtype=jnp.int32)
    t, head = jax.lax.div(row, group), kv_head * group + jax.lax.rem(row, group)
    exists = row < num_rows * group
    element = jnp.arange(dim, dtype=jnp.int32)[None]
    mask = jnp.broadcast_to(exists[:, None], (config.block_rows, dim))
    q = load(q_ref.at[request, t[:, None], head[:, None], element], mask=mask, other=0.0)
    last = load(positions_ref.at[request, t], mask=exists, other=-1)  # [R], last visible position

    # Range of columns that this block's rows attend to, within the page table.
    end = jnp.minimum(jnp.max(last) + 1, page_table_ref.shape[1] * page_size)
    first, origin = jnp.int32(0), last
    if origins_ref is not None:
        origin = load(origins_ref.at[request, t], mask=exists, other=-1)
    if window is not None:
        oldest = jnp.min(jnp.where(last >= 0, origin, NOWHERE))
        first = jnp.maximum(oldest - window + 1, 0)
    scale = LOG2_E / math.sqrt(dim)  # includes log2(e): exp2 is the hardware's instruction
    has_token_scales = scale_ref is not None and len(scale_ref.shape) > 2
    if scale_ref is not None and not has_token_scales:
        scale = scale * scale_ref[layer, 0]

    def block(i, carry):
        out, maximum, total = carry
        column = (i * config.num_splits + split) * config.block_tokens
        column += jnp.arange(config.block_tokens, dtype=jnp.int32)  # [C]
        needed = (column >= first) & (column < end)
        page_index = jax.lax.div(column, page_size)
        page = load(page_table_ref.at[request, page_index], mask=needed, other=-1)
        used = page >= 0
        mask = jnp.broadcast_to(used[:, None], (config.block_tokens, dim))
        within = jax.lax.rem(column, page_size)
        offset = within[:, None]

        def load_tokens(which):
            at = (layer, page[:, None], offset, jnp.int32(which), kv_head, element)
            return load(kv_ref.at[at], mask=mask, other=zero_of(kv_ref.dtype)).astype(
                q.dtype
            )  # [C, D]

        def load_scales(which):
            assert scale_ref is not None
            at = (layer, page, within, jnp.int32(which), kv_head)
            return load(scale_ref.at[at], mask=used, other=0.0)[None]  # [1, C]

        # By default, f32 would be multiplied as tf32.
        scores = dot(q, load_tokens(0), trans_b=True, precision="highest") * scale  # [R, C]
        if has_token_scales:
            scores = scores * load_scales(0)
        if soft_cap is not None:
            scores = jnp.tanh(scores * (1 / (LOG2_E * soft_cap))) * (LOG2_E * soft_cap)
        column = jnp.where(used, column, NOWHERE)[None]
        visible = column <= last[:, None]
        if window is not None:
            visible &= column > origin[:, None] - window
        scores = jnp.where(visible, scores, -jnp.inf)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new_maximum[:, None])
        decay = jnp.exp2(maximum - new_maximum)
        values = load_tokens(1)
        of_values = weights * load_scales(1) if has_token_scales else weights
        out = out * decay[:, None] + dot(of_values.astype(q.dtype), values, precision="highest")
        return out, new_maximum, total * decay + jnp.sum(weights, axis=1)

    maximum = jnp.full((config.block_rows,), UNSEEN, jnp.float32)
    total = jnp.zeros((config.block_rows,), jnp.float32)
    if sinks_ref is not None:  # the first split includes the sink, whose value is 0
        sink = load(sinks_ref.at[head], mask=exists, other=0.0).astype(jnp.float32) * LOG2_E
        maximum = jnp.where(split == 0, sink, maximum)
        total = jnp.where(split == 0, 1.0, total)
    carry = jnp.zeros((config.block_rows, dim), jnp.float32), maximum, total
    # Blocks split, split + num_splits, ..., from the block of `first` to the block of `end` - 1.
    first_block = jax.lax.div(first, config.block_tokens)
    end_block = pl.cdiv(end, config.block_tokens)
    start, stop = (
        pl.cdiv(jnp.maximum(number - split, 0), config.num_splits)
        for number in (first_block, end_block)
    )
    out, maximum, total = jax.lax.fori_loop(start, stop, block, carry)
    if scale_ref is not None and not has_token_scales:
        out = out * scale_ref[layer, 1]

    where = (request, t[:, None], head[:, None])
    if config.num_splits == 1:
        out = out / jnp.where(total > 0, total, 1.0)[:, None]
        mask = jnp.broadcast_to(exists[:, None], out.shape)
        store(out_refs[0].at[*where, element], out.astype(out_refs[0].dtype), mask=mask)
        if len(out_refs) > 1:
            lse = maximum * (1 / LOG2_E) + jnp.log(total)  # -inf if the row attends to nothing
            store(out_refs[1].at[request, t, head], lse, mask=exists)
        return
    # For a split without visible tokens, the combine kernel reads only the statistics.
    mask = jnp.broadcast_to((exists & (total > 0))[:, None], out.shape)
    store(out_refs[0].at[*where, split, element], out, mask=mask)
    for ref, statistic in zip(out_refs[1:], (maximum, total), strict=True):
        store(ref.at[request, t, head, split], statistic, mask=exists)


def _combine_kernel(partial_ref, maximum_ref, total_ref, out_ref, *, width: int):
    """Combine the partial results [D] for all parts of a row's context; write the row's output.

    A partial result is weighted by 2^(m - M), where m is the part's maximum score, and M is the
    maximum of all parts. These scores already have a factor of log2(e).
    """
    head, t, request = (pl.program_id(axis) for axis in range(3))
    num_splits, dim = partial_ref.shape[3:]
    split = jnp.arange(width, dtype=jnp.int32)
    element = jnp.arange(dim, dtype=jnp.int32)
    where = (request, t, head, split)
    exists = split < num_splits
    maximum = load(maximum_ref.at[where], mask=exists, other=UNSEEN)
    total = load(total_ref.at[where], mask=exists, other=0.0)
    mask = jnp.broadcast_to((total > 0)[:, None], (width, dim))
    where = (request, t, head, split[:, None], element[None])
    partial = load(partial_ref.at[where], mask=mask, other=0.0)
    weights = jnp.exp2(maximum - jnp.max(maximum))
    total = jnp.sum(total * weights)
    out = jnp.sum(partial * weights[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
    out_ref[request, t, head] = out.astype(out_ref.dtype)
