"""Causal attention of T new tokens per request over a paged key-value pool.

For query row t of request b at absolute position p = positions[b, t]:

    out[b, t, h] = sum_{j <= p} softmax_j(q[b, t, h] . K_j[h'] / sqrt(D)) V_j[h'],   h' = h // G

where token j of request b lies in page `page_table[b, j // page_size]` at offset `j % page_size`,
and G = H / H_kv query heads share a key head. The new tokens' own keys are already in the pool.
Prefill is T = chunk, verification T = K + 1, plain decoding T = 1.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.paged_attention.reference import paged_attention_reference

IMPLEMENTATIONS = {"reference": paged_attention_reference}


def paged_attention(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    kernels: str = "auto",
) -> jax.Array:
    """Attention output [B, T, H, D] in q's dtype; softmax statistics are f32.

    Args:
        q: [B, T, H, D] queries.
        kv: [L, pages, page_size, 2, H_kv, D] pool of keys (index 0) and values (index 1).
        layer: i32[] layer of the pool to read.
        page_table: i32[B, P] pages of each request in order; -1 where none is assigned.
        positions: i32[B, T] absolute position of each row; a row at -1 is padding and returns 0.
        kernels: implementation to use, see `dispatch.run`.

    No page past a request's last position is read into the result: it may hold NaN.

    Raises:
        ValueError: shapes that do not fit each other, naming the argument.
    """
    if q.ndim != 4 or q.shape[:2] != positions.shape:
        raise ValueError(
            f"q must be [B, T, H, D] with positions [B, T]; got {q.shape}, {positions.shape}"
        )
    if kv.ndim != 6 or kv.shape[3] != 2 or kv.shape[5] != q.shape[3] or q.shape[2] % kv.shape[4]:
        raise ValueError(
            f"kv must be [L, pages, page_size, 2, H_kv, D] with D={q.shape[3]} and H_kv dividing "
            f"H={q.shape[2]}; got {kv.shape}"
        )
    if page_table.ndim != 2 or page_table.shape[0] != q.shape[0]:
        raise ValueError(f"page_table must be [B={q.shape[0]}, P]; got {page_table.shape}")
    return run("paged_attention", kernels, IMPLEMENTATIONS, q, kv, layer, page_table, positions)
