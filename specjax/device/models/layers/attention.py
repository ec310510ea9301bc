"""Attention layer: grouped-query softmax attention over the context of `Rows`."""

from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.rope_write import HeadWeights
from specjax.device.cache.paged import PagedAttention, ProjectedHeads
from specjax.device.models.layers.linear import linear
from specjax.device.models.layers.rows import Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Attention:
    """Weights of an attention layer; optional ones are None if an architecture lacks them."""

    qkv: jax.Array  # [D_in, (H + 2 H_kv) head_dim], plus H head_dim for an output gate after q
    out: jax.Array  # [H head_dim, D]
    qkv_bias: jax.Array | None = None
    out_bias: jax.Array | None = None
    q_norm: jax.Array | None = None  # [head_dim]
    k_norm: jax.Array | None = None
    sinks: jax.Array | None = None  # [H], see `paged_attention`


def attention(
    params: Attention,
    x: jax.Array,
    rows: Rows,
    angles: tuple[jax.Array, jax.Array],
    kv: Any,
    layer: jax.Array,
    kind: PagedAttention,
    query_scales: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Project x [N, D_in], rotate, attend and project back; return ([N, D], kv)."""
    qkv = linear(x, params.qkv)
    weights = HeadWeights(params.qkv_bias, params.q_norm, params.k_norm)
    mixed, kv = rows.mix(
        kind, kv, layer, ProjectedHeads(qkv, weights, angles, params.sinks, query_scales)
    )
    gate_at = kind.num_heads * kind.head_dim
    gate_end = qkv.shape[1] - 2 * kind.num_kv_heads * kind.head_dim
    mixed = mixed.reshape(x.shape[0], -1)
    if gate_at < gate_end:
        mixed = mixed * jax.nn.sigmoid(qkv[:, gate_at:gate_end])
    y = linear(mixed, params.out)
    return (y if params.out_bias is None else y + params.out_bias), kv
