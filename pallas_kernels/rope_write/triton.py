"""A Triton kernel for all operations after the projection of q, k and v and before attention."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.capability import compute_capability
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.page_formats import page_format, why_no_kernel
from pallas_kernels.quantisation import as_stored
from pallas_kernels.triton_call import load, store, triton_call


@dataclass(frozen=True)
class RopeWriteTuning:
    """Launch parameters of the kernel of `rope_write`.

    A program computes `block_heads` heads of a row, because one head is little work.
    """

    block_heads: int = 8
    num_warps: int = 4


DEFAULT = RopeWriteTuning()


def rope_write_triton(
    qkv: jax.Array,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    scales: jax.Array | None,
    *,
    num_heads: int,
    eps: float,
    is_centred: bool,
    writes: bool,
    config: RopeWriteTuning = DEFAULT,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `rope_write`.

    Raises:
        UnsupportedError: the kernel does not support D, or the dtype or size of the pool.
    """
    page_size, _, num_kv_heads, dim = kv.shape[2:]
    half = cos.shape[-1]
    if dim & (dim - 1) or dim < 16:
        raise UnsupportedError(f"kv has heads of D={dim}; a power of two of at least 16 is needed")
    if reason := why_no_kernel(kv, None if interpret else compute_capability()):
        raise UnsupportedError(reason)
    if kv.dtype.itemsize < 2 and page_format(kv.dtype) is None:
        raise UnsupportedError(f"kv is {kv.dtype}; 16 or 32 bits, or a page format, are needed")
    has_token_scales = scales is not None and scales.ndim > 2
    layer_scales = [] if scales is None or has_token_scales else [scales]
    pools = [kv, scales] if has_token_scales else [kv]
    batch, num_rows = positions.shape
    present = [x for x in (bias, q_norm, k_norm) if x is not None]
    kernel = functools.partial(
        _kernel,
        has=(bias is not None, q_norm is not None, k_norm is not None),
        num_rows=num_rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        k_at=qkv.shape[-1] // dim - 2 * num_kv_heads,
        dim=dim,
        half=half,
        page_size=page_size,
        table_width=page_table.shape[1],
        eps=eps,
        is_centred=is_centred,
        writes=writes,
        block_heads=config.block_heads,
        dtype=qkv.dtype,
        pool_dtype=kv.dtype,
        num_pools=len(pools),
        has_layer_scales=len(layer_scales) > 0,
    )
    num_made = num_heads + 2 * num_kv_heads if writes else num_heads
    call = functools.partial(
        triton_call,
        kernel,
        name="rope_write",
        grid=(batch * num_rows, pl.cdiv(num_made, config.block_heads)),
        num_warps=config.num_warps,
        interpret=interpret,
    )
    queries = jax.ShapeDtypeStruct((batch, num_rows, num_heads, dim), qkv.dtype)
    operands = [qkv, cos, sin, page_table, positions, layer.reshape(1), *present]
    if not writes:
        (q,) = call(operands, [queries])
        return q, kv, scales
    operands += layer_scales
    made = [queries] if num_heads else []  # arrays must not be empty
    aliases = {len(operands) + i: len(made) + i for i in range(len(pools))}
    made += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools]
    results = call([*operands, *pools], made, aliases=aliases)
    q = results[0] if num_heads else jnp.zeros(queries.shape, queries.dtype)
    new = results[-len(pools) :]
    return q, new[0], new[1] if has_token_scales else scales


def _kernel(
    qkv_ref,
    cos_ref,
    sin_ref,
    table_ref,
    positions_ref,
    layer_ref,
    *refs,
    has,
    num_rows,
    num_heads,
    num_kv_heads,
    k_at,
    dim,
    half,
    page_size,
    table_width,
    eps,
    is_centred,
    writes,
    block_heads,
    dtype,
    pool_dtype,
    num_pools,
    has_layer_scales,
):
    weights = iter(refs[: sum(has)])
    bias_ref, q_norm_ref, k_norm_ref = (next(weights) if one else None for one in has)
    b, t = pl.program_id(0) // num_rows, pl.program_id(0) % num_rows
    head = pl.program_id(1) * block_heads + jnp.arange(block_heads, dtype=jnp.int32)
    is_q = head < num_heads
    is_v = head >= num_heads + num_kv_heads
    is_made = head < num_heads + (2 * num_kv_heads if writes else 0)
    # Heads in the projection; keys and values come after any gates.
    source = (jnp.where(is_q, head, head - num_heads + k_at) * dim)[:, None]
    i = jnp.arange(dim, dtype=jnp.int32)[None, :]
    partner = jnp.where(i < half, i + half, jnp.where(i < 2 * half, i - half, i))
    mask = jnp.broadcast_to(is_made[:, None], (block_heads, dim))

    def projected(column):  # [block_heads, dim]
        x = load(qkv_ref.at[b, t, source + column], mask=mask, other=0.0).astype(jnp.float32)
        if bias_ref is not None:
            bias = load(bias_ref.at[source + column], mask=mask, other=0.0)
            x = (x + bias.astype(jnp.float32)).astype(dtype).astype(jnp.float32)
        return x

    def weight(column):  # norm weight; 1 for heads without a norm
        w = jnp.ones((block_heads, dim), jnp.float32)
        for ref, of in (q_norm_ref, is_q), (k_norm_ref, ~(is_q | is_v)):
            if ref is not None:
                given = ref[jnp.broadcast_to(column, (block_heads, dim))].astype(jnp.float32)
                w = jnp.where(of[:, None], given + 1.0 if is_centred else given, w)
        return w

    x, other = projected(i), projected(partner)
    if q_norm_ref is not None or k_norm_ref is not None:
        is_normed = jnp.zeros_like(is_q)
        if q_norm_ref is not None:
            is_normed |= is_q
        if k_norm_ref is not None:
            is_normed |= ~(is_q | is_v)
        scale = jax.lax.rsqrt(jnp.sum(x * x, axis=1) / dim + eps)
        scale = jnp.where(is_normed, scale, 1.0)[:, None]
        x, other = x * scale * weight(i), other * scale * weight(partner)
    angle = jnp.broadcast_to(jnp.where(i < half, i, i - half), (block_heads, dim))
    turns = (i < 2 * half) & ~is_v[:, None]
    cos = load(cos_ref.at[b, t, angle], mask=turns, other=1.0)
    sin = load(sin_ref.at[b, t, angle], mask=turns, other=0.0)
    y = (x * cos + jnp.where(i < half, -other, other) * sin).astype(dtype)

    # After the input pools, which are updated in place.
    outputs = iter(refs[sum(has) + (has_layer_scales + num_pools) * writes :])
    # In interpret mode masked lanes store the old value, so their indices must also be distinct.
    if num_heads:
        store(next(outputs).at[b, t, head[:, None], i], y, mask=mask & is_q[:, None])
    if writes:
        position = positions_ref[b, t]
        index = jnp.maximum(position, 0) // page_size
        page = table_ref[b, jnp.minimum(index, table_width - 1)]
        stands = (position >= 0) & (index < table_width) & (page >= 0)
        kept = jnp.where(is_q, head + 2 * num_kv_heads, head - num_heads)
        wide = kept[:, None]
        token = layer_ref[0], jnp.maximum(page, 0), jnp.maximum(position, 0) % page_size
        given = None
        if has_layer_scales:
            of_layer = refs[sum(has)]
            given = jnp.where(is_v, of_layer[layer_ref[0], 1], of_layer[layer_ref[0], 0])
        y, made = as_stored(y, pool_dtype, given)
        store(
            next(outputs).at[*token, wide // num_kv_heads, wide % num_kv_heads, i],
            y,
            mask=mask & ~is_q[:, None] & stands,
        )
        if made is not None:
            at = *token, kept // num_kv_heads, kept % num_kv_heads
            store(next(outputs).at[at], made, mask=is_made & ~is_q & stands)
