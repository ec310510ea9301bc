"""Rows (the tokens of one forward pass) for training, where attention uses no paged cache.

The rows are whole sequences, unrolled chains of drafts, or blocks of drafts. They implement the
protocol `Rows` of the engine's models.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp

from specjax.device.cache.kind import CacheKind
from specjax.device.cache.paged import PagedAttention
from specjax.device.drafters.dflash import AttentionMask


class _Attending:
    """The base class of all rows for training."""

    @property
    def attends(self) -> bool:
        """True, since training uses the output of attention in all rows. See `Rows.attends`."""
        return True


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CausalRows(_Attending):
    """B concatenated sequences of T tokens; row b*T + t is position t of sequence b."""

    positions: jax.Array  # i32[B T]
    length: int = field(metadata={"static": True})
    kernels: str = field(default="reference", metadata={"static": True})  # kernels have no gradient

    @classmethod
    def of(cls, batch: int, length: int) -> Self:
        """Return the rows of `batch` sequences that all start at position 0."""
        return cls(jnp.tile(jnp.arange(length, dtype=jnp.int32), batch), length)

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: Any
    ) -> tuple[jax.Array, Any]:
        """See `Rows.mix`; the cache is not used."""
        return kind.causal(self.length, inputs), cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnrolledRows(_Attending):
    """Causal rows at one step of an unrolled chain of drafts (EAGLE-3's training-time test).

    The rows of step 0 are the tokens of the sequences. Row t of a later step is a draft after token
    t. As at inference, this row attends to the rows 0 to t of step 0, and to row t of step 1,
    of step 2, and so on up to its own step.

    The cache is a tuple that collects the keys and values of each step, and starts as ().
    """

    positions: jax.Array  # i32[B T], shifted by the step's index
    length: int = field(metadata={"static": True})
    kernels: str = field(default="reference", metadata={"static": True})  # kernels have no gradient

    @classmethod
    def of(cls, batch: int, length: int, step: int) -> "UnrolledRows":
        """Return the rows of step `step`, for `batch` sequences of `length` tokens each."""
        return cls(jnp.tile(jnp.arange(length, dtype=jnp.int32) + step, batch), length)

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: Any
    ) -> tuple[jax.Array, Any]:
        """See `Rows.mix`."""
        return kind.unrolled(self.length, cache, inputs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContextRows(CausalRows):
    """Causal rows that store their keys and values for `BlockRows`.

    The cache is a pair (keys, values), each [layers, rows, key-value heads, head size].
    """

    def init(self, kind: PagedAttention) -> tuple[jax.Array, jax.Array]:
        """Return an empty cache in float32."""
        shape = kind.num_layers, len(self.positions), kind.num_kv_heads, kind.head_dim
        return jnp.zeros(shape), jnp.zeros(shape)

    def mix(self, kind: Any, cache: Any, layer: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        """See `Rows.mix`; `kind` is a `PagedAttention`."""
        _, *made = kind.split(inputs)
        kept = tuple(x.at[layer].set(new) for x, new in zip(cache, made, strict=True))
        return kind.causal(self.length, inputs), kept


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockRows(_Attending):
    """N blocks of W = `width` rows in each of B sequences.

    `starts` has the position of each block's first row. A row attends to rows of its block and to
    tokens before the block, as far as `mask` allows it. The keys and values of the tokens before
    the block are in the cache of `ContextRows`.
    """

    starts: jax.Array  # i32[B, N]
    width: int = field(metadata={"static": True})
    mask: AttentionMask = field(default=AttentionMask(), metadata={"static": True})
    kernels: str = field(default="reference", metadata={"static": True})  # kernels have no gradient

    @property
    def positions(self) -> jax.Array:
        """The positions of all rows: i32[B N W], for N blocks of W rows in each of B sequences."""
        offsets = jnp.arange(self.width, dtype=jnp.int32)[None, None]
        return (self.starts[..., None] + offsets).reshape(-1)

    def by_request(self, x: jax.Array) -> jax.Array:
        """Reshape rows x [B N W, ...] to [B N, W, ...], with an entry for each block of W rows."""
        return x.reshape(-1, self.width, *x.shape[1:])

    def mix(self, kind: Any, cache: Any, layer: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        """See `Rows.mix`; `kind` is a `PagedAttention`."""
        queries, *own = kind.split(inputs)
        (size, count), heads = self.starts.shape, own[0].shape[1:]
        k, v = (x.reshape(size, count, self.width, *heads) for x in own)
        seen_k, seen_v = (x[layer].reshape(size, -1, *heads) for x in cache)
        length = seen_k.shape[1]
        q = queries.reshape(size, count, self.width, heads[0], -1, heads[1]) * heads[1] ** -0.5
        before = jnp.einsum("bnwhgd,bthd->bnhgwt", q, seen_k).astype(jnp.float32)
        within = jnp.einsum("bnwhgd,bnshd->bnhgws", q, k).astype(jnp.float32)
        own, begins = jnp.arange(self.width), self.starts[..., None, None]
        # Offsets from the block's first row: negative in the context.
        seen = jnp.arange(length)[None, None, None] - begins  # [B, N, 1, T]
        is_before = (seen < 0) & self.mask.sees(own[None, None, :, None], seen)  # [B, N, W, T]
        before = jnp.where(is_before[:, :, None, None], before, -jnp.inf)
        sees = jax.lax.broadcast_to_rank(self.mask.sees(own[:, None], own[None]), within.ndim)
        within = jnp.where(sees, within, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([before, within], axis=-1), axis=-1)
        weights = weights.astype(v.dtype)
        out = jnp.einsum("bnhgwt,bthd->bnwhgd", weights[..., :length], seen_v)
        out = out + jnp.einsum("bnhgws,bnshd->bnwhgd", weights[..., length:], v)
        return out.reshape(queries.shape), cache
