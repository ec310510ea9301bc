"""Causal attention of T new tokens per request over a paged key-value pool.

For query row t of request b at absolute position p = positions[b, t]:

    out[b, t, h] = sum_j w_j V_j[h // G]
    w_j = softmax_j(f(q[b, t, h] . K_j[h // G] / sqrt(D)))

over 0 <= j <= p. With a window, only o - window < j <= p, where o is origins[b, t], or p without
origins. G = H / H_kv query heads share a key head. K and V are the keys and values in the pool,
which already contains the new tokens. Token j of request b is in page
`page_table[b, j // page_size]` at offset `j % page_size`.

f(x) = x, or with a soft cap c, f(x) = c tanh(x / c). With sinks, the softmax's denominator has one
more term, exp(sinks[h]), so the weights sum to less than 1. A pool of 8-bit numbers (see
`page_formats`) is multiplied by its scales.

T is the length of a chunk in prefill, the number of drafts plus one in verification, and 1 in plain
decoding.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.page_formats import check_scales
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.triton import paged_attention_triton

IMPLEMENTATIONS = {"triton": paged_attention_triton, "reference": paged_attention_reference}


def paged_attention(
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
    kernels: str = "auto",
) -> jax.Array:
    """Return the attention output [B, T, H, D] in q's dtype; softmax statistics are f32.

    Args:
        q: [B, T, H, D], the queries.
        kv: [L, pages, page_size, 2, H_kv, D], the pool of keys (index 0) and values (index 1).
        layer: i32[], the layer of the pool to read.
        page_table: i32[B, P], the pages of each request in order; -1 where no page is assigned.
        positions: i32[B, T], the last position that each row attends to, usually its own position.
            A row at -1 is padding, and its result is 0.
        window: the number of tokens that a row attends to, up to and including its origin; None for
            all tokens.
        origins: i32[B, T], the last position of each row's window; None for `positions`.
        soft_cap: c, the bound of scores' absolute values; None for no bound.
        scales: f32, the scales of a pool of 8-bit numbers. In formats with scales of tokens, they
            are [L, pages, page_size, 2, H_kv], for keys and values. In formats with scales of
            layers, they are [L, 2], or None if all are 1.
        sinks: [H], for each head an additional score that has no value; None for no sinks.
        kernels: implementation to use, see `dispatch.run`.

    Pages past a request's last position or before its first row's window do not affect the result,
    so they may contain NaN.

    Raises:
        ValueError: arguments are inconsistent or a scale is missing; the message names them.
        UnsupportedError: the named kernel does not support the arguments.
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
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, or None for no window; got {window}")
    if origins is not None and (window is None or origins.shape != positions.shape):
        raise ValueError(
            f"origins need a window, and must have the shape of positions, {positions.shape}; got "
            f"{origins.shape} with window={window}"
        )
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive, or None for no cap; got {soft_cap}")
    if sinks is not None and sinks.shape != (q.shape[2],):
        raise ValueError(f"sinks must be [H={q.shape[2]}]; got {sinks.shape}")
    check_scales(kv, scales, "kv", kv.shape[3:5])
    return run(
        "paged_attention",
        kernels,
        IMPLEMENTATIONS,
        q,
        kv,
        layer,
        page_table,
        positions,
        window=window,
        origins=origins,
        soft_cap=soft_cap,
        scales=scales,
        sinks=sinks,
    )


def paged_attention_part(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    kernels: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Return the attention over one part of a context, and the log-sum-exp of each row's scores.

    The output is f32[B, T, H, D], and the log-sum-exp f32[B, T, H]. The average of all parts'
    outputs, weighted by exp(log-sum-exp), is the output over the whole context. The kernel
    is fast only for many rows, because it does not divide the part's tokens among programs.

    The arguments are as in `paged_attention`, but positions count from the start of the part. A row
    before the part attends to nothing, so its log-sum-exp is -inf. A row past the part's end
    attends to the whole part.
    """
    operands = q, kv, layer, page_table, positions
    return run("paged_attention", kernels, IMPLEMENTATIONS, *operands, returns_lse=True)
