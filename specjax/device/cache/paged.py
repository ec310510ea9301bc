"""Pages of keys and values, which requests share out by a page table."""

import jax
import jax.numpy as jnp


def init_pool(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype
) -> jax.Array:
    """An empty pool [L, pages, page_size, 2, H_kv, D]: a token's key and value lie side by side."""
    return jnp.zeros((num_layers, num_pages, page_size, 2, num_kv_heads, head_dim), dtype)
