"""Attention over latents in plain JAX, with a streaming softmax over blocks of pages."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantisation import widened

BLOCK_TOKENS = 128


def latent_attention_reference(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    rank: int,
    scale: float,
    scales: jax.Array | None = None,
) -> jax.Array:
    """See `latent_attention`.

    The context is read in blocks of a fixed size, up to the end of the longest request. A block
    that a row does not attend to adds exactly 0, so a row's bits do not depend on the lengths of
    other requests.
    """
    batch, num_rows, num_heads, width = q.shape
    num_pages, page_size = pool.shape[1:3]
    pages = max(1, BLOCK_TOKENS // page_size)
    page_table = jnp.pad(
        page_table, ((0, 0), (0, -page_table.shape[1] % pages)), constant_values=-1
    )
    # [B, T H, E]: the rows of a request form one matrix, as all heads have the same key.
    queries = q.reshape(batch, -1, width) * jnp.asarray(scale, q.dtype)
    last = jnp.repeat(positions, num_heads, axis=1)[..., None]  # [B, T H, 1]
    # Per page, the end of the used positions; 0 for a page that is not assigned.
    ends = jnp.where(page_table >= 0, positions.max(axis=1, keepdims=True) + 1, 0)
    page_table = jnp.clip(page_table, 0, num_pages - 1)

    def block(i, carry):
        maximum, total, out = carry
        ids, block_ends = (
            jax.lax.dynamic_slice_in_dim(x, i * pages, pages, axis=1) for x in (page_table, ends)
        )
        column = (i * pages * page_size + jnp.arange(pages * page_size))[None]  # [1, C]
        used = column < jnp.repeat(block_ends, page_size, axis=1)  # [B, C]
        entries = pool.at[layer, ids].get(mode="promise_in_bounds")
        entries = dequantised(entries, scales, layer, ids, rank, q.dtype)
        entries = entries.reshape(batch, pages * page_size, width)
        # NaN in an unused page would give NaN even with weight zero.
        entries = jnp.where(used[..., None], entries, 0)
        scores = jnp.einsum("bre,bce->brc", queries, entries, preferred_element_type=jnp.float32)
        scores = jnp.where((column[None] <= last) & used[:, None], scores, -jnp.inf)
        new_maximum = jnp.maximum(maximum, scores.max(axis=-1, keepdims=True))
        finite = jnp.where(jnp.isfinite(new_maximum), new_maximum, 0.0)
        weights, decay = jnp.exp(scores - finite), jnp.exp(maximum - finite)
        partial = jnp.einsum(
            "brc,bce->bre",
            weights.astype(q.dtype),
            entries[..., :rank],
            preferred_element_type=jnp.float32,
        )
        total = total * decay + weights.sum(axis=-1, keepdims=True)
        return new_maximum, total, out * decay + partial

    shape = queries.shape[:2]
    carry = (
        jnp.full((*shape, 1), -jnp.inf, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros((*shape, rank), jnp.float32),
    )
    num_blocks = jnp.minimum(
        positions.max() // (pages * page_size) + 1, page_table.shape[1] // pages
    )
    _, total, out = jax.lax.fori_loop(0, num_blocks, block, carry)
    out = out / jnp.where(total > 0, total, 1.0)
    return out.astype(q.dtype).reshape(batch, num_rows, num_heads, rank)


def dequantised(
    entries: jax.Array,
    scales: jax.Array | None,
    layer: jax.Array,
    ids: jax.Array,
    rank: int,
    dtype: jnp.dtype,
) -> jax.Array:
    """Return entries [..., page_size, E] times their scales, in `dtype`.

    The entries are from the pages `ids` i32[...] of the layer. `scales` are the scales of the pool,
    or None if all are 1.
    """
    if scales is None:
        return widened(entries, dtype)
    has_token_scales = scales.ndim > 2
    own = scales[layer, ids] if has_token_scales else scales[layer]  # [..., 2]
    is_latent = jnp.arange(entries.shape[-1]) < rank
    own = jax.lax.broadcast_to_rank(own, entries.ndim)
    each = jnp.where(jax.lax.broadcast_to_rank(is_latent, own.ndim), own[..., :1], own[..., 1:])
    return (widened(entries, jnp.float32) * each).astype(dtype)
