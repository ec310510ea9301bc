"""The grouped product in plain JAX: blocks of rows that share a group, one product each."""

import jax
import jax.numpy as jnp

BLOCK_ROWS = 8


def grouped_matmul_reference(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
) -> jax.Array:
    """See `grouped_matmul`. Reads each used matrix once per block, and no other matrices.

    A block may extend past the end of its group; the next group's first block overwrites these
    rows.
    """
    x = x if sources is None else x[sources]
    num_rows = x.shape[0]
    ends = jnp.cumsum(group_sizes)
    num_blocks = -(-group_sizes // BLOCK_ROWS)
    block_ends = jnp.cumsum(num_blocks)
    x = jnp.pad(x, ((0, BLOCK_ROWS), (0, 0)))

    def block(i, out):
        group = jnp.searchsorted(block_ends, i, side="right")
        within = i - (block_ends[group] - num_blocks[group])
        start = ends[group] - group_sizes[group] + within * BLOCK_ROWS
        rows = jax.lax.dynamic_slice_in_dim(x, start, BLOCK_ROWS)
        product = jnp.matmul(rows, weights[group], preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, product.astype(x.dtype), start, 0)

    out = jnp.zeros((x.shape[0], weights.shape[2]), x.dtype)
    out = jax.lax.fori_loop(0, block_ends[-1], block, out)[:num_rows]
    if targets is None:
        return out
    return jnp.zeros_like(out).at[targets].set(out, unique_indices=True)
