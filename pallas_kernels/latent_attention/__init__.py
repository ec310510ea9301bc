"""Causal attention of T new tokens per request over a paged pool of latents (MLA, absorbed).

A token's entry in the pool is (c, r). Its latent c of `rank` numbers gives the keys and values of
all heads; r is the rotated part of the key, shared by all heads (DeepSeek-V2, section 2.1). The
up-projection of keys is absorbed into the queries: q = (W_uk^T q_nope, q_rope). So all heads have
the same key (c, r) and the same value c. For row t of request b,

    out[b, t, h] = sum_j softmax_j(scale q[b, t, h] . (c_j, r_j)) c_j

over j <= positions[b, t], where token j of request b is in page `page_table[b, j // page_size]` at
offset `j % page_size`. A pool of 8-bit numbers (see `page_formats`) is multiplied by its scales.
The pool already contains the new tokens' entries. The caller applies the up-projection of values.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.latent_attention.reference import latent_attention_reference
from pallas_kernels.latent_attention.triton import latent_attention_triton
from pallas_kernels.page_formats import check_scales

IMPLEMENTATIONS = {"triton": latent_attention_triton, "reference": latent_attention_reference}


def latent_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    rank: int,
    scale: float,
    scales: jax.Array | None = None,
    kernels: str = "auto",
) -> jax.Array:
    """Return the weighted sums of latents [B, T, H, rank] in q's dtype.

    The statistics of the softmax are f32.

    Args:
        q: [B, T, H, E], the absorbed queries, with E = rank + rotated dimensions.
        pool: [L, pages, page_size, E], the entries of tokens.
        layer: i32[], the layer of the pool to read.
        page_table: i32[B, P], the pages of each request in order; -1 where no page is assigned.
        positions: i32[B, T], the last position that each row attends to, usually its own position.
            A row at -1 is padding, and its result is 0.
        rank: the number of latent dimensions in an entry.
        scale: multiplies the scores.
        scales: f32, the scales of a pool of 8-bit numbers. In formats with scales of tokens, they
            are [L, pages, page_size, 2], one for the latent c and one for the rotated part r. In
            formats with scales of layers, they are [L, 2], or None if all are 1.
        kernels: implementation to use, see `dispatch.run`.

    Pages past a request's last position do not affect the result: they may contain NaN.

    Raises:
        ValueError: arguments are inconsistent; the message names them.
        UnsupportedError: the named kernel does not support the arguments.
    """
    if q.ndim != 4 or q.shape[:2] != positions.shape:
        raise ValueError(
            f"q must be [B, T, H, E] with positions [B, T]; got {q.shape}, {positions.shape}"
        )
    if pool.ndim != 4 or pool.shape[3] != q.shape[3]:
        raise ValueError(
            f"pool must be [L, pages, page_size, E] with E={q.shape[3]}; got {pool.shape}"
        )
    if page_table.ndim != 2 or page_table.shape[0] != q.shape[0]:
        raise ValueError(f"page_table must be [B={q.shape[0]}, P]; got {page_table.shape}")
    if not 0 < rank < q.shape[3]:
        raise ValueError(f"rank must be between 0 and E={q.shape[3]}; got {rank}")
    check_scales(pool, scales, "pool", (2,))
    return run(
        "latent_attention",
        kernels,
        IMPLEMENTATIONS,
        q,
        pool,
        layer,
        page_table,
        positions,
        rank=rank,
        scale=scale,
        scales=scales,
    )
