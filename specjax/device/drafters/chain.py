"""Chain drafting: a one-layer head that runs once per draft, on its own previous output.

At position p, the head takes the target's feature f_p and the token x_{p+1}, and predicts x_{p+2}.
A round's first draft comes from the last row that the target has verified. For each further draft,
the head takes its own previous output instead of a feature.

The head's cache never needs a rollback (Li et al. 2024, EAGLE, section 3). It has one layer, so the
keys and values of a row depend on no other row. After the target has verified rows, the head
computes their keys and values again, from the target's features. The new keys and values overwrite
the keys and values of the drafts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheKind, CacheSizes
from specjax.device.cache.pages import Pages
from specjax.device.drafters.checkpoint import DrafterFiles
from specjax.device.drafters.drafter import DraftContext, Drafter, Observation, Params
from specjax.device.drafters.head import DraftHead, HeadDrafter
from specjax.device.loading import Log
from specjax.device.models.config_fields import refuse_quantised
from specjax.device.models.layers.rows import Rows
from specjax.device.models.model import Features, Model
from specjax.device.models.registry import open_weights, read_config
from specjax.device.placement import Placement
from specjax.device.verification import Draft


class Head(DraftHead, Protocol):
    """The interface of a chain drafter's model."""

    @property
    def cache_kind(self) -> CacheKind: ...
    @property
    def hidden_size(self) -> int: ...

    def fuse(self, params: Any, features: Features) -> jax.Array:
        """Return the hidden states [N, D] that the head reads, computed from the target's features.

        `features` are the features of N rows.
        """
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
        """Run the head on `rows`; return its output hidden states [N, D] and its new cache.

        The input of each row is its token in `tokens` i32[N] and its hidden state in `hidden`
        [N, D]. `kv` is the head's cache.
        """
        ...

    def logits(self, target: Model, params: Params, hidden: jax.Array) -> jax.Array:
        """Return draft logits f32[N, V_d] for the head's output `hidden` [N, D]."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainState:
    """The head's KV cache, and the hidden state from which each request's next drafts start."""

    kv: Pages  # [1, pages, page_size, 2, H_kv, D]
    hidden: jax.Array  # [S, D], the head's input at the last verified position


@dataclass(frozen=True)
class ChainDrafter(HeadDrafter[Head]):
    """A drafter that runs `head` once per draft token."""

    def num_passes(self, k: int) -> int:
        """Return k: each draft takes one pass."""
        return k

    def init_state(self, sizes: CacheSizes, dtype: Any) -> ChainState:
        """Return a state with an empty cache, which is indexed by the target's page table."""
        hidden = jnp.zeros((sizes.num_slots, self.head.hidden_size), dtype)
        return ChainState(self.head.cache_kind.init(sizes, dtype), hidden)

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
            # The first row is the last verified row: the cache already holds its keys and values.
            rows = context.rows_at(context.starts - 1 + i, writes=i > 0)
            padded, kv = self._advance(target, params, token, hidden, rows, kv)
            logits = self.head.logits(target, params, padded)[:: rows.width]
            hidden = padded[:: rows.width]
            token, q = context.draw(
                logits, ids, target.vocab_size, drafts, is_greedy=self.is_greedy
            )
            drafts.append(token)
            probs += [] if q is None else [q]
        draft = Draft.stacked(drafts, probs, context.slots.shape[0])
        return draft, ChainState(kv, state.hidden)

    def _advance(self, target, params, tokens, hidden, rows, kv):
        """Run the head on one real row per request, followed by padding rows.

        Return the head's output [B W, D] and its new cache. W is the number of rows per request,
        with padding.
        """
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
        """See `Drafter.observe`.

        Only keys and values are computed: the head's output is unused, so JAX or XLA removes the
        feed-forward layer as dead code.
        """
        fused, following = self.head.fuse(params.drafter, seen.features), seen.following
        rows = replace(seen.rows, attends=False)
        _, kv = self.head.extend(target, params, following.reshape(-1), fused, rows, state.kv)
        hidden = fused.reshape(*following.shape, -1)[jnp.arange(len(following)), seen.last]
        return ChainState(kv, state.hidden.at[seen.slots].set(hidden, mode="drop"))


HeadLoad = Callable[[DrafterFiles, SpeculativeConfig, Model, np.dtype], tuple[Any, Any]]


def chain_loader(
    load_head: HeadLoad, make: Callable[[Any, bool], Drafter] = ChainDrafter
) -> Callable[..., tuple[Drafter, Any]]:
    """Return the `registry.Load` function of a chain drafter.

    `load_head` loads the head and its parameters. `make(head, is_greedy)` returns the drafter.
    """

    def load(
        folder: Path | None,
        config: SpeculativeConfig,
        target: Model,
        dtype: np.dtype,
        placement: Placement,
        log: Log,
    ) -> tuple[Drafter, Any]:
        assert folder is not None, config.method
        hf = read_config(folder)
        refuse_quantised(hf)
        files = DrafterFiles(open_weights(folder, hf, dtype), hf, placement, log)
        head, params = load_head(files, config, target, dtype)
        return make(head, config.draft_sample_method == "greedy"), params

    return load
