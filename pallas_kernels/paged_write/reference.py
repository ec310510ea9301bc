"""The page write in plain JAX: one scatter of whole rows, keys and values together."""

import jax
import jax.numpy as jnp


def paged_write_reference(
    kv: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> jax.Array:
    """See `paged_write`."""
    num_pages, page_size = kv.shape[1:3]
    index = positions // page_size
    page = jnp.take_along_axis(page_table, index, axis=1, mode="fill", fill_value=-1)
    # An id past the pool is dropped by the scatter; a negative one would wrap around.
    page = jnp.where((positions >= 0) & (page >= 0), page, num_pages)
    rows = jnp.stack([k, v], axis=2).astype(kv.dtype)  # [B, T, 2, H_kv, D]
    return kv.at[layer, page, positions % page_size].set(rows, mode="drop")
