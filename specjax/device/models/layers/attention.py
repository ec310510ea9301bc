"""Softmax attention with grouped keys, over whatever the rows' context is."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specjax.device.models.layers.norm import rms_norm
from specjax.device.models.layers.rope import rotate


class Rows(Protocol):
    """The N token rows of one extension: where each stands (i32[N]) and what it may attend to.

    `attend(kv, layer, q, k, v)` takes q [N, H, D] and k, v [N, H_kv, D], makes k and v part of the
    context `kv`, and returns the attention output [N, H, D] with the context that holds them.
    """

    @property
    def positions(self) -> jax.Array: ...

    def attend(
        self, kv: Any, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, Any]: ...


class AttentionShape(Protocol):
    """The static geometry of an attention layer; a model has these fields."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Attention:
    """Weights of an attention layer; optional ones are None where an architecture lacks them."""

    qkv: jax.Array  # [D_in, (H + 2 H_kv) head_dim]
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
    q, k, v = jnp.split(
        qkv.reshape(x.shape[0], -1, shape.head_dim),
        [shape.num_heads, shape.num_heads + shape.num_kv_heads],
        axis=1,
    )
    if params.q_norm is not None and params.k_norm is not None:
        q = rms_norm(q, params.q_norm, shape.rms_norm_eps)
        k = rms_norm(k, params.k_norm, shape.rms_norm_eps)
    mixed, kv = rows.attend(kv, layer, rotate(q, angles), rotate(k, angles), v)
    y = mixed.reshape(x.shape[0], -1) @ params.out
    return (y if params.out_bias is None else y + params.out_bias), kv
