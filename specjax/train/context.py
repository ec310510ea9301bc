"""Rows without a cache: whole sequences under a causal mask, as training sees them."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule import DeltaRuleWeights
from pallas_kernels.gated_delta_rule import Heads as DeltaHeads
from pallas_kernels.gated_delta_rule.reference import (
    convolve,
    gated_norm,
    recur_chunks,
    split_inputs,
    split_tokens,
)
from pallas_kernels.rope_write import split_heads
from specjax.device.models.layers.rows import AttentionShape, ProjectedHeads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CausalRows:
    """B sequences of T tokens laid end to end; row b*T + t stands at position t of sequence b."""

    positions: jax.Array  # i32[B T]
    length: int = field(metadata={"static": True})
    kernels: str = field(default="reference", metadata={"static": True})  # kernels have no gradient

    @classmethod
    def of(cls, batch: int, length: int) -> "CausalRows":
        """Rows of `batch` sequences that all start at position 0."""
        return cls(jnp.tile(jnp.arange(length, dtype=jnp.int32), batch), length)

    def attend(
        self, kv: Any, layer: jax.Array, heads: ProjectedHeads, shape: AttentionShape
    ) -> tuple[jax.Array, Any]:
        """Causal attention within each sequence; there is no context to keep."""
        q, k, v = split(heads, shape)
        scores = causal_scores(q, k, self.length)
        return weighted_values(jax.nn.softmax(scores, axis=-1), v, q.shape), kv

    def recur(
        self,
        cache: Any,
        layer: jax.Array,
        x: jax.Array,
        weights: DeltaRuleWeights,
        heads: DeltaHeads,
        eps: float,
    ) -> tuple[jax.Array, Any]:
        """The gated delta rule from an empty state; there is none to keep."""
        x = x.reshape(-1, self.length, x.shape[-1])
        raw, z, gates = split_inputs(x, weights, heads)
        padded = jnp.pad(raw, ((0, 0), (weights.conv.shape[0] - 1, 0), (0, 0)))
        tokens = split_tokens(convolve(padded, weights.conv), gates, heads)
        shape = x.shape[0], heads.num_values, heads.value_dim, heads.key_dim
        _, out = recur_chunks(jnp.zeros(shape), tokens)
        out = out.astype(x.dtype)
        if weights.norm is not None:
            out = gated_norm(out, z, weights.norm, eps)
        return out.reshape(-1, *out.shape[2:]), cache


def split(heads: ProjectedHeads, shape: AttentionShape) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [B T, H, D], keys and values [B T, H_kv, D]."""
    return split_heads(
        heads.qkv,
        *heads.weights,
        *heads.angles,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        eps=shape.rms_norm_eps,
        is_centred=shape.has_centred_norms,
    )


def heads_first(x: jax.Array, length: int) -> jax.Array:
    """[B T, H, D] -> [B, H, T, D]."""
    return x.reshape(-1, length, *x.shape[1:]).transpose(0, 2, 1, 3)


def grouped(q: jax.Array, num_kv_heads: int, length: int) -> jax.Array:
    """Queries [B T, H, D] as [B, H_kv, H / H_kv, T, D], next to the keys that they share."""
    q = heads_first(q, length)
    return q.reshape(q.shape[0], num_kv_heads, -1, *q.shape[2:])


def causal_scores(q: jax.Array, k: jax.Array, length: int) -> jax.Array:
    """Masked scaled scores f32[B, H_kv, G, T, T] of q [B T, H, D] against k [B T, H_kv, D]."""
    queries = grouped(q, k.shape[1], length) * (q.shape[-1] ** -0.5)
    scores = jnp.einsum("bhgtd,bhsd->bhgts", queries, heads_first(k, length))
    mask = jnp.tril(jnp.ones((length, length), bool))
    return jnp.where(mask, scores.astype(jnp.float32), -jnp.inf)


def weighted_values(weights: jax.Array, v: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Attention output of `shape` [B T, H, D] from weights [B, H_kv, G, T, T] over v."""
    length = weights.shape[-2]
    out = jnp.einsum("bhgts,bhsd->bhgtd", weights.astype(v.dtype), heads_first(v, length))
    return out.transpose(0, 3, 1, 2, 4).reshape(shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnrolledRows:
    """Causal rows on the `step`-th draft of an unrolled chain (EAGLE-3's training-time test).

    The context `kv` is a tuple of (k, v) per step so far. As at inference, a row sees the verified
    rows up to its own (step 0, causal) and, of each later step, only what it drafted itself.
    """

    positions: jax.Array  # i32[B T], shifted by `step`
    length: int = field(metadata={"static": True})
    kernels: str = field(default="reference", metadata={"static": True})  # kernels have no gradient

    @classmethod
    def of(cls, batch: int, length: int, step: int) -> "UnrolledRows":
        """Rows of `batch` sequences, `step` drafts on."""
        return cls(jnp.tile(jnp.arange(length, dtype=jnp.int32) + step, batch), length)

    def attend(
        self, kv: Any, layer: jax.Array, heads: ProjectedHeads, shape: AttentionShape
    ) -> tuple[jax.Array, Any]:
        """Attention over step 0's rows and the row's own drafts, one softmax over both."""
        q, k, v = split(heads, shape)
        kv = (*kv, (k, v))
        (k0, v0), drafted = kv[0], kv[1:]
        queries = grouped(q, k.shape[1], self.length) * (q.shape[-1] ** -0.5)
        scores = [causal_scores(q, k0, self.length)]
        for key, _ in drafted:
            own = heads_first(key, self.length)[:, :, None]
            scores.append((queries * own).sum(-1, keepdims=True).astype(jnp.float32))
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        out = weighted_values(weights[..., : self.length], v0, q.shape)
        for i, (_, value) in enumerate(drafted):
            own = weights[..., self.length + i].transpose(0, 3, 1, 2)  # [B, T, H_kv, G]
            own = own.reshape(q.shape[0], k.shape[1], -1, 1).astype(v.dtype)
            out = out + (own * value[:, :, None]).reshape(q.shape)
        return out, kv

    def recur(
        self,
        cache: Any,
        layer: jax.Array,
        x: jax.Array,
        weights: DeltaRuleWeights,
        heads: DeltaHeads,
        eps: float,
    ) -> tuple[jax.Array, Any]:
        """Drafters have no recurrent layers."""
        raise NotImplementedError("a chain of drafts runs attention layers only")
