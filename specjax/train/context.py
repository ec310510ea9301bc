"""Rows without a cache: whole sequences under a causal mask, as training sees them."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CausalRows:
    """B sequences of T tokens laid end to end; row b*T + t stands at position t of sequence b."""

    positions: jax.Array  # i32[B T]
    length: int = field(metadata={"static": True})

    @classmethod
    def of(cls, batch: int, length: int) -> "CausalRows":
        """Rows of `batch` sequences that all start at position 0."""
        return cls(jnp.tile(jnp.arange(length, dtype=jnp.int32), batch), length)

    def attend(
        self, kv: Any, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Causal attention within each sequence; there is no context to keep."""
        scores = causal_scores(q, k, self.length)
        return weighted_values(jax.nn.softmax(scores, axis=-1), v, q.shape), kv


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
