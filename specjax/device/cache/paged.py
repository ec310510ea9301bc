"""Rows over a paged key-value pool: the context of every serving step."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_write import paged_write


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedRows:
    """T rows for each of B requests, laid end to end; row b*T + t belongs to request b.

    Rejected tokens need no undoing: they lie past a request's length, where no row looks and
    where the next extension writes.
    """

    positions: jax.Array  # i32[B T], absolute; -1 for a padding row
    page_table: jax.Array  # i32[B, P]; -1 where no page is assigned
    kernels: str = field(default="auto", metadata={"static": True})

    @classmethod
    def starting_at(
        cls,
        starts: jax.Array,
        counts: jax.Array,
        num_rows: int,
        page_table: jax.Array,
        kernels: str,
    ) -> "PagedRows":
        """`num_rows` rows per request from position starts[b] on, of which counts[b] are real."""
        row = jnp.arange(num_rows, dtype=jnp.int32)[None]
        positions = jnp.where(row < counts[:, None], starts[:, None] + row, -1)
        return cls(positions.reshape(-1), page_table, kernels)

    @property
    def width(self) -> int:
        """T, rows per request."""
        return self.positions.shape[0] // self.page_table.shape[0]

    def attend(
        self, kv: jax.Array, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Write k and v [B T, H_kv, D] to the pages, then attend q [B T, H, D] over them."""
        batch = self.page_table.shape[0]
        positions = self.positions.reshape(batch, -1)
        q_rows, k_rows, v_rows = (x.reshape(batch, -1, *x.shape[1:]) for x in (q, k, v))
        kv = paged_write(
            kv, layer, self.page_table, positions, k_rows, v_rows, kernels=self.kernels
        )
        out = paged_attention(q_rows, kv, layer, self.page_table, positions, kernels=self.kernels)
        return out.reshape(q.shape), kv


def padded_width(batch: int, width: int, multiple: int) -> int:
    """The least T >= width with batch * T a multiple of `multiple`, as matrix units want it."""
    while batch * width % multiple:
        width += 1
    return width


def init_pool(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype
) -> jax.Array:
    """An empty pool [L, pages, page_size, 2, H_kv, D]: a token's key and value lie side by side."""
    return jnp.zeros((num_layers, num_pages, page_size, 2, num_kv_heads, head_dim), dtype)
