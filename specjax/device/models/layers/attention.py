"""Softmax attention with grouped keys, over whatever the rows' context is."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specjax.device.models.layers.rope import rotate
from specjax.device.models.layers.rows import Rows


class AttentionShape(Protocol):
    """The static geometry of an attention layer; a model has these fields."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...

    def norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """The model's RMSNorm over the last axis."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Attention:
    """Weights of an attention layer; optional ones are None where an architecture lacks them."""

    qkv: jax.Array  # [D_in, (H + 2 H_kv) head_dim]; with an output gate after q, H head_dim more
    out: jax.Array  # [H head_dim, D]
    qkv_bias: jax.Array | None = None
    out_bias: jax.Array | None = None
    q_norm: jax.Array | None = None  # [head_dim]
    k_norm: jax.Array | None = None


def attention(
    params: Attention,
    x: jax.Array,
    rows: Rows,
    angles: tuple[jax.Array, jax.Array],
    kv: Any,
    layer: jax.Array,
    shape: AttentionShape,
) -> tuple[jax.Array, Any]:
    """Project x [N, D_in], rotate, attend and project back: ([N, D], kv)."""
    qkv = x @ params.qkv
    if params.qkv_bias is not None:
        qkv = qkv + params.qkv_bias
    qkv = qkv.reshape(x.shape[0], -1, shape.head_dim)
    v_at = qkv.shape[1] - shape.num_kv_heads
    ends = shape.num_heads, v_at - shape.num_kv_heads, v_at
    q, gate, k, v = jnp.split(qkv, ends, axis=1)
    if params.q_norm is not None and params.k_norm is not None:
        q, k = shape.norm(q, params.q_norm), shape.norm(k, params.k_norm)
    mixed, kv = rows.attend(kv, layer, rotate(q, angles), rotate(k, angles), v)
    if gate.shape[1]:
        mixed = mixed * jax.nn.sigmoid(gate)
    y = mixed.reshape(x.shape[0], -1) @ params.out
    return (y if params.out_bias is None else y + params.out_bias), kv
