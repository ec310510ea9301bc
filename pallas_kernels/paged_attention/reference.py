"""Paged attention in plain JAX, with a streaming softmax over blocks of pages."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantisation import widened

BLOCK_TOKENS = 128


def paged_attention_reference(
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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `paged_attention`.

    The context is read in blocks of a fixed size, from the start of the first row's window to the
    end of the longest request. A block that a row does not attend to adds exactly 0, so a row's
    bits do not depend on the lengths of other requests.
    """
    batch, num_rows, num_heads, dim = q.shape
    num_pages, page_size, _, num_kv_heads = kv.shape[1:5]
    pages = max(1, BLOCK_TOKENS // page_size)
    page_table = jnp.pad(
        page_table, ((0, 0), (0, -page_table.shape[1] % pages)), constant_values=-1
    )
    # [B, H_kv, T G, D]: rows with the same key head form one matrix.
    queries = q.reshape(batch, num_rows, num_kv_heads, -1, dim).transpose(0, 2, 1, 3, 4)
    group = queries.shape[3]
    queries = queries.reshape(batch, num_kv_heads, num_rows * group, dim) * (dim**-0.5)
    has_token_scales = scales is not None and scales.ndim > 2
    origins = positions if origins is None else origins
    row_positions, row_origins = (
        jnp.repeat(x, group, axis=1)[:, None, :, None] for x in (positions, origins)
    )
    heads = jnp.arange(num_kv_heads)[:, None]
    # Per page, the end of the used positions; 0 for a page that is not assigned.
    ends = jnp.where(page_table >= 0, positions.max(axis=1, keepdims=True) + 1, 0)
    page_table = jnp.clip(page_table, 0, num_pages - 1)
    no_row = page_table.shape[1] * page_size
    starts = jnp.zeros((batch, 1), jnp.int32)  # first position a request attends to
    if window is not None:
        oldest = jnp.where(positions >= 0, origins, no_row).min(axis=1, keepdims=True)
        starts = jnp.maximum(oldest - window + 1, 0)

    def block(i, carry):
        maximum, total, out = carry
        ids, block_ends = (
            jax.lax.dynamic_slice_in_dim(x, i * pages, pages, axis=1) for x in (page_table, ends)
        )
        column = (i * pages * page_size + jnp.arange(pages * page_size))[None]  # [1, C]
        used = (column >= starts) & (column < jnp.repeat(block_ends, page_size, axis=1))
        used = used[:, None]  # [B, 1, C]

        def gather(pool, which):  # [B, H_kv, C, ...]
            # Gather with heads first, as the products need them, to avoid a transpose.
            tokens = pool.at[layer, ids[:, None], :, which, heads].get(mode="promise_in_bounds")
            return tokens.reshape(batch, num_kv_heads, pages * page_size, *tokens.shape[4:])

        def load(which):
            return widened(gather(kv, which), q.dtype)

        def scales_of(which):  # of tokens, [B, H_kv, 1, C]
            return jnp.where(used, gather(scales, which), 0.0)[:, :, None]

        keys = load(0)
        # NaN in an unused page would give NaN even with weight zero.
        values = jnp.where(used[..., None], load(1), 0)
        column = column[None, None]
        visible = (column <= row_positions) & used[:, :, None]
        if window is not None:
            visible &= column > row_origins - window
        scores = jnp.einsum("bhrd,bhcd->bhrc", queries, keys, preferred_element_type=jnp.float32)
        if has_token_scales:
            scores *= scales_of(0)
        elif scales is not None:
            scores *= scales[layer, 0]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible, scores, -jnp.inf)
        new_maximum = jnp.maximum(maximum, scores.max(axis=-1, keepdims=True))
        finite = jnp.where(jnp.isfinite(new_maximum), new_maximum, 0.0)
        weights = jnp.exp(scores - finite)
        scale = jnp.exp(maximum - finite)
        partial = jnp.einsum(
            "bhrc,bhcd->bhrd",
            (weights * scales_of(1) if has_token_scales else weights).astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return (
            new_maximum,
            total * scale + weights.sum(axis=-1, keepdims=True),
            out * scale + partial,
        )

    shape = queries.shape[:3]
    maximum = jnp.full((*shape, 1), -jnp.inf, jnp.float32)
    if sinks is not None:  # seen by every row, with a value of 0
        sink = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, group), (1, num_rows))
        maximum = jnp.broadcast_to(sink[..., None], maximum.shape)
    carry = (
        maximum,
        jnp.full_like(maximum, 0.0 if sinks is None else 1.0),
        jnp.zeros((*shape, dim), jnp.float32),
    )
    num_blocks = jnp.minimum(
        positions.max() // (pages * page_size) + 1, page_table.shape[1] // pages
    )
    first_block = jnp.minimum(starts.min() // (pages * page_size), num_blocks)
    maximum, total, out = jax.lax.fori_loop(first_block, num_blocks, block, carry)
    out = out / jnp.where(total > 0, total, 1.0)
    if scales is not None and not has_token_scales:
        out *= scales[layer, 1]

    def by_row(x):
        """Return x [B, H_kv, T G, ...] reshaped to [B, T, H, ...]."""
        x = x.reshape(batch, num_kv_heads, num_rows, group, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(batch, num_rows, num_heads, -1)

    if returns_lse:
        return by_row(out), by_row(maximum + jnp.log(total))[..., 0]
    return by_row(out.astype(q.dtype))
