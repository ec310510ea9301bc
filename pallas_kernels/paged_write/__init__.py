"""Writing the keys and values of new tokens into a paged pool, in place.

    kv[layer, page_table[b, p // page_size], p % page_size] = (k[b, t], v[b, t])

for p = positions[b, t], in every row t of every request b.

Rows at position -1, past the page table, or on a page that is not assigned (-1) write nothing.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.paged_write.reference import paged_write_reference

IMPLEMENTATIONS = {"reference": paged_write_reference}


def paged_write(
    kv: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    kernels: str = "auto",
) -> jax.Array:
    """The pool [L, pages, page_size, 2, H_kv, D] with the rows written; use only the result.

    Args:
        kv: the pool, updated in place where the caller donated it.
        layer: i32[] layer of the pool to write.
        page_table: i32[B, P] pages of each request in order; -1 where none is assigned.
        positions: i32[B, T] absolute position of each row.
        k: [B, T, H_kv, D] keys, already rotated.
        v: [B, T, H_kv, D] values.
        kernels: implementation to use, see `dispatch.run`.

    Raises:
        ValueError: shapes that do not fit each other, naming the argument.
    """
    if kv.ndim != 6 or kv.shape[3] != 2:
        raise ValueError(f"kv must be [L, pages, page_size, 2, H_kv, D]; got {kv.shape}")
    if positions.ndim != 2:
        raise ValueError(f"positions must be [B, T]; got {positions.shape}")
    if page_table.ndim != 2 or page_table.shape[0] != positions.shape[0]:
        raise ValueError(f"page_table must be [B={positions.shape[0]}, P]; got {page_table.shape}")
    if k.shape != v.shape or k.shape != (*positions.shape, *kv.shape[4:]):
        raise ValueError(
            f"k and v must be [B, T, H_kv, D] = {(*positions.shape, *kv.shape[4:])}; "
            f"got {k.shape}, {v.shape}"
        )
    return run("paged_write", kernels, IMPLEMENTATIONS, kv, layer, page_table, positions, k, v)
