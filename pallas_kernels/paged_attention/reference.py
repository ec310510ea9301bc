"""Paged attention in plain JAX: blocks of pages, streaming softmax."""

import jax
import jax.numpy as jnp

BLOCK_TOKENS = 128


def paged_attention_reference(
    q: jax.Array, kv: jax.Array, layer: jax.Array, page_table: jax.Array, positions: jax.Array
) -> jax.Array:
    """See `paged_attention`.

    Context is read in blocks of a fixed size, as many as the longest request of the batch needs. A
    block that lies past a request's end adds exactly nothing to it, so a row's bits do not
    depend on how long its neighbours are.
    """
    batch, num_rows, num_heads, dim = q.shape
    num_pages, page_size, _, num_kv_heads = kv.shape[1:5]
    pages = max(1, BLOCK_TOKENS // page_size)
    page_table = jnp.pad(
        page_table, ((0, 0), (0, -page_table.shape[1] % pages)), constant_values=-1
    )
    # [B, H_kv, T G, D]: rows that share a key head are one matrix.
    queries = q.reshape(batch, num_rows, num_kv_heads, -1, dim).transpose(0, 2, 1, 3, 4)
    group = queries.shape[3]
    queries = queries.reshape(batch, num_kv_heads, num_rows * group, dim) * (dim**-0.5)
    row_positions = jnp.repeat(positions, group, axis=1)[:, None, :, None]
    heads = jnp.arange(num_kv_heads)[:, None]
    # The first position that a page does not serve: 0 for one that is not assigned.
    ends = jnp.where(page_table >= 0, positions.max(axis=1, keepdims=True) + 1, 0)
    page_table = jnp.clip(page_table, 0, num_pages - 1)

    def block(i, carry):
        maximum, total, out = carry
        ids, block_ends = (
            jax.lax.dynamic_slice_in_dim(x, i * pages, pages, axis=1) for x in (page_table, ends)
        )
        column = i * pages * page_size + jnp.arange(pages * page_size)
        used = (column < jnp.repeat(block_ends, page_size, axis=1))[:, None]  # [B, 1, C]

        def load(which):
            # Gathered with the heads in front, where the products want them: no transpose.
            tokens = kv.at[layer, ids[:, None], :, which, heads].get(mode="promise_in_bounds")
            return tokens.reshape(batch, num_kv_heads, pages * page_size, dim)

        keys = load(0)
        # A weight of zero would still turn a NaN of an unused page into NaN.
        values = jnp.where(used[..., None], load(1), 0)
        visible = (column <= row_positions) & used[:, :, None]
        scores = jnp.einsum("bhrd,bhcd->bhrc", queries, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scores, -jnp.inf)
        new_maximum = jnp.maximum(maximum, scores.max(axis=-1, keepdims=True))
        finite = jnp.where(jnp.isfinite(new_maximum), new_maximum, 0.0)
        weights = jnp.exp(scores - finite)
        scale = jnp.exp(maximum - finite)
        partial = jnp.einsum(
            "bhrc,bhcd->bhrd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return (
            new_maximum,
            total * scale + weights.sum(axis=-1, keepdims=True),
            out * scale + partial,
        )

    shape = queries.shape[:3]
    carry = (
        jnp.full((*shape, 1), -jnp.inf, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros((*shape, dim), jnp.float32),
    )
    num_blocks = jnp.minimum(
        positions.max() // (pages * page_size) + 1, page_table.shape[1] // pages
    )
    _, total, out = jax.lax.fori_loop(0, num_blocks, block, carry)
    out = (out / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
    out = out.reshape(batch, num_kv_heads, num_rows, group, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(q.shape)
