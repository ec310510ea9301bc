"""Chain drafting: a one-layer head run once per draft, fed with its own output.

The head sits at position p with the target's feature f_p and the token x_{p+1}, and predicts
x_{p+2}. Of verified rows, whose features are the target's, only the keys and values are made:
they depend on the row alone. A chain starts by running the head at the last of them, and goes on
from the head's own output. Rows written while drafting are overwritten when the same positions
are verified, so the head's cache never needs undoing (Li et al. 2024, EAGLE, section 3).
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specjax.device.cache.kind import CacheKind, CacheSizes
from specjax.device.drafters.drafter import DraftContext, DrafterWeights, Observation, Params
from specjax.device.models.layers.rows import Rows
from specjax.device.models.model import Features, Model
from specjax.device.verification import Draft


class Head(DrafterWeights, Protocol):
    """What sets one chain drafter apart from another. Hashable; its weights are arguments."""

    @property
    def cache_kind(self) -> CacheKind: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def aux_layers(self) -> tuple[int, ...]: ...
    @property
    def has_embedding(self) -> bool: ...

    def fuse(self, params: Any, features: Features) -> jax.Array:
        """The target's features as the head's hidden state [N, D]."""
        ...

    def extend(
        self,
        target: Model,
        params: Params,
        tokens: jax.Array,
        hidden: jax.Array,
        rows: Rows,
        kv: Any,
    ) -> tuple[jax.Array, Any]:
        """The next hidden state [N, D] of rows holding tokens i32[N] and hidden [N, D], and kv."""
        ...

    def logits(self, target: Model, params: Params, hidden: jax.Array) -> jax.Array:
        """Draft logits f32[N, V_d]."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainState:
    """The head's own cache, and where each request's next chain starts."""

    kv: jax.Array  # [1, pages, page_size, 2, H_kv, D]
    hidden: jax.Array  # [S, D], the head's input at the last verified position


@dataclass(frozen=True)
class ChainDrafter:
    """Drafts with `head`, one token after another."""

    head: Head
    is_greedy: bool = False  # draft the argmax at any temperature

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input the head reads."""
        return self.head.aux_layers

    @property
    def weights(self) -> Head:
        """The head's."""
        return self.head

    def draft_slots(self, k: int) -> int:
        """See `Drafter.draft_slots`: one token is drafted after another, outside of the budgets."""
        return 0

    def init_state(self, sizes: CacheSizes, dtype: Any) -> ChainState:
        """An empty cache that shares the target's page table."""
        hidden = jnp.zeros((sizes.num_slots, self.head.hidden_size), dtype)
        return ChainState(self.head.cache_kind.init(sizes, dtype), hidden)

    def share(self, params: Any, target: Model, target_params: Any) -> tuple["ChainDrafter", Any]:
        """See `Drafter.share`: the embedding may be a copy of the target's."""
        if not self.head.has_embedding:
            return self, params
        shared = target.embed(target_params, jnp.arange(target.vocab_size))
        if shared.shape != params.embedding.shape or not bool((shared == params.embedding).all()):
            return self, params
        head: Any = self.head
        head = replace(head, has_embedding=False)
        return replace(self, head=head), replace(params, embedding=None)

    def draft(
        self, target: Model, params: Params, state: ChainState, context: DraftContext, k: int
    ) -> tuple[Draft, ChainState]:
        """See `Drafter.draft`."""
        hidden, kv = state.hidden[context.slots], state.kv
        token = context.history.tokens[jnp.arange(context.starts.shape[0]), context.starts]
        ids = self.head.target_ids(params.drafter)
        drafts: list[jax.Array] = []
        probs: list[jax.Array] = []
        for i in range(k):
            # The first row is the last verified one, whose keys and values are written.
            rows = context.rows_at(context.starts - 1 + i, writes=i > 0)
            padded, kv = self._advance(target, params, token, hidden, rows, kv)
            logits = self.head.logits(target, params, padded)[:: rows.width]
            hidden = padded[:: rows.width]
            token, q = context.draw(
                logits, ids, target.vocab_size, drafts, is_greedy=self.is_greedy
            )
            drafts.append(token)
            probs += [] if q is None else [q]
        empty = jnp.zeros((context.slots.shape[0], 0), jnp.int32)
        draft = Draft(
            jnp.stack(drafts, axis=1) if drafts else empty,
            jnp.stack(probs, axis=1) if probs else None,
        )
        return draft, ChainState(kv, state.hidden)

    def _advance(self, target, params, tokens, hidden, rows, kv):
        """The head's next hidden states [B width, D], the real row of each request first."""
        width = rows.width

        def pad(x):  # [B, ...] -> [B width, ...], the real row first
            filled = jnp.zeros((x.shape[0], width - 1, *x.shape[1:]), x.dtype)
            return jnp.concatenate([x[:, None], filled], axis=1).reshape(-1, *x.shape[1:])

        return self.head.extend(target, params, pad(tokens), pad(hidden), rows, kv)

    def observe(
        self,
        target: Model,
        params: Params,
        state: ChainState,
        seen: Observation,
    ) -> ChainState:
        """See `Drafter.observe`. Nothing reads the head's output, so that only keys and values are
        computed: attention and the feed-forward layer are dead code, which JAX or XLA drops.
        """
        fused, following = self.head.fuse(params.drafter, seen.features), seen.following
        _, kv = self.head.extend(target, params, following.reshape(-1), fused, seen.rows, state.kv)
        hidden = fused.reshape(*following.shape, -1)[jnp.arange(len(following)), seen.last]
        return ChainState(kv, state.hidden.at[seen.slots].set(hidden, mode="drop"))
