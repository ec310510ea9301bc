"""`rope_write` in plain JAX; the write is one scatter of whole rows."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantisation import as_stored
from pallas_kernels.rms_norm.reference import rms_norm


def rope_write_reference(
    qkv: jax.Array,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    scales: jax.Array | None,
    *,
    num_heads: int,
    eps: float,
    is_centred: bool,
    writes: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `rope_write`."""
    num_kv_heads, dim = kv.shape[4:]
    q, k, v = split_heads(
        qkv,
        bias,
        q_norm,
        k_norm,
        cos,
        sin,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        eps=eps,
        is_centred=is_centred,
    )
    if not writes:
        return q, kv, scales
    page, page_size = pages_of(kv, page_table, positions), kv.shape[2]
    of_layer = None
    if scales is not None and scales.ndim == 2:
        of_layer = scales[layer][:, None]  # [2, 1]
    rows, made = as_stored(jnp.stack([k, v], axis=2), kv.dtype, of_layer)  # [B, T, 2, H_kv, D]
    if made is not None and scales is not None:
        scales = scales.at[layer, page, positions % page_size].set(made, mode="drop")
    return q, kv.at[layer, page, positions % page_size].set(rows, mode="drop"), scales


def split_heads(
    qkv: jax.Array,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    is_centred: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return q [..., H, D], k and v [..., H_kv, D] of projections [..., F].

    q and k are normalised and rotated. `bias`, `q_norm` and `k_norm` are the fields of
    `HeadWeights`; `rope_write` explains the other arguments.
    """
    if bias is not None:
        qkv = qkv + jax.lax.broadcast_to_rank(bias, qkv.ndim)
    heads = qkv.reshape(*qkv.shape[:-1], -1, head_dim)
    v_at = heads.shape[-2] - num_kv_heads
    ends = num_heads, v_at - num_kv_heads, v_at
    q, _, k, v = jnp.split(heads, ends, axis=-2)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps, is_centred)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps, is_centred)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Return x [..., heads, head_dim] with its first 2 n dimensions rotated by angles [..., n].

    Dimension i is paired with dimension i + n (the HF layout). Dimensions past 2 n are unchanged.
    """
    cos, sin = (a[..., None, :].astype(x.dtype) for a in (cos, sin))
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate([*rotated, rest], axis=-1)


def pages_of(pool: jax.Array, page_table: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the page of each position i32[B, T].

    For a position without an assigned page, return the pool's number of pages.
    """
    num_pages, page_size = pool.shape[1:3]
    index = positions // page_size
    page = jnp.take_along_axis(page_table, index, axis=1, mode="fill", fill_value=-1)
    # The scatter drops page ids past the pool; negative ids would wrap around.
    return jnp.where((positions >= 0) & (page >= 0), page, num_pages)
