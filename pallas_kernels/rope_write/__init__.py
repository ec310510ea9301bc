"""Normalises and rotates projected queries and keys, and writes keys and values to pages.

For a row at position p, whose projection has the heads q | gate | k | v in that order:

    q' = rotate(norm(q), p)      k' = rotate(norm(k), p)
    kv[layer, page_table[b, p // page_size], p % page_size] = (k', v)

where rotate turns dimensions i and i + n of a head by the row's i-th angle, for i < n, and keeps
dimensions past 2 n (Su et al. 2021; partial rotation, HF's pairing). The norm is applied only if
its weight is not None. Gates are ignored. In a pool of 8-bit numbers (see `page_formats`), k' and v
are divided by their scales.

A row writes nothing if its position is -1 or past the page table, or if its page is not assigned
(-1).
"""

from typing import NamedTuple

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.page_formats import check_scales
from pallas_kernels.rope_write.reference import rope_write_reference
from pallas_kernels.rope_write.reference import split_heads as split_heads
from pallas_kernels.rope_write.triton import rope_write_triton

IMPLEMENTATIONS = {"triton": rope_write_triton, "reference": rope_write_reference}


class HeadWeights(NamedTuple):
    """Bias and norm weights of the projected heads; None for a missing weight."""

    bias: jax.Array | None = None  # [F]
    q_norm: jax.Array | None = None  # [D], RMSNorm over a head
    k_norm: jax.Array | None = None  # [D]


def rope_write(
    qkv: jax.Array,
    weights: HeadWeights,
    angles: tuple[jax.Array, jax.Array],
    kv: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    num_heads: int,
    scales: jax.Array | None = None,
    eps: float = 0.0,
    is_centred: bool = False,
    writes: bool = True,
    kernels: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return queries [B, T, H, D] in the projection's dtype, the new pool, and its new scales.

    Args:
        qkv: [B, T, F], the projection, with F = (H + gates + 2 H_kv) D.
        weights: the bias and the norms' weights.
        angles: cos and sin of the angles, f32[B, T, n] each, with n <= D / 2.
        kv: the old pool [L, pages, page_size, 2, H_kv, D], which is updated in place if the caller
            donated it.
        layer: i32[], the layer of the pool to write.
        page_table: i32[B, P], the pages of each request in order; -1 where no page is assigned.
        positions: i32[B, T], the absolute position of each row.
        num_heads: H, the number of query heads; 0 to write only keys and values.
        scales: f32, see `paged_attention`. Scales of tokens are updated like the pool.
        eps, is_centred: arguments of the norms, see `rms_norm`.
        writes: whether to write to the pool; if not, only queries are computed.
        kernels: implementation to use, see `dispatch`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    if kv.ndim != 6 or kv.shape[3] != 2:
        raise ValueError(f"kv must be [L, pages, page_size, 2, H_kv, D]; got {kv.shape}")
    if positions.ndim != 2:
        raise ValueError(f"positions must be [B, T]; got {positions.shape}")
    if page_table.ndim != 2 or page_table.shape[0] != positions.shape[0]:
        raise ValueError(f"page_table must be [B={positions.shape[0]}, P]; got {page_table.shape}")
    num_kv_heads, dim = kv.shape[4:]
    width = qkv.shape[-1]
    if qkv.ndim != 3 or qkv.shape[:2] != positions.shape:
        raise ValueError(
            f"qkv must be [B, T, F] with positions [B, T]={positions.shape}; got {qkv.shape}"
        )
    if width % dim or width < (num_heads + 2 * num_kv_heads) * dim:
        raise ValueError(
            f"qkv must hold at least H={num_heads} + 2 H_kv={2 * num_kv_heads} heads of D={dim}; "
            f"got F={width}"
        )
    if any(x.shape[:2] != positions.shape or 2 * x.shape[2] > dim for x in angles):
        raise ValueError(
            f"angles must be cos and sin [B, T, n <= D / 2 = {dim // 2}]; "
            f"got {[x.shape for x in angles]}"
        )
    for name, wanted in ("bias", width), ("q_norm", dim), ("k_norm", dim):
        given = getattr(weights, name)
        if given is not None and given.shape != (wanted,):
            raise ValueError(f"weights.{name} must be [{wanted}]; got {given.shape}")
    check_scales(kv, scales, "kv", kv.shape[3:5])
    return run(
        "rope_write",
        kernels,
        IMPLEMENTATIONS,
        qkv,
        *weights,
        *angles,
        kv,
        layer,
        page_table,
        positions,
        scales,
        num_heads=num_heads,
        eps=eps,
        is_centred=is_centred,
        writes=writes,
    )
