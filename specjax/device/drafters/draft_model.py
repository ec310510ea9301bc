"""A whole model as the drafter (Leviathan et al. 2023): a small decoder of the same vocabulary.

It keeps keys and values of its own, by the target's page table. A round of K drafts runs it K
times: the last token gives the first draft, each draft the next one. So the last draft is not run:
if all are accepted, its keys and values are missing, and the next round runs it before the last
token, in one pass of two rows. A round without drafts makes this pass, too, without its logits.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows
from specjax.device.drafters.drafter import DraftContext, Observation, Params
from specjax.device.models.model import Model, init_caches, is_recurrent
from specjax.device.models.registry import is_unused, load_model
from specjax.device.placement import Placement
from specjax.device.verification import Draft


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a `DraftModel`, see `DrafterWeights`."""

    model: Model
    prefix_in_target: None = None

    def specs(self, names: Collection[str] = ()) -> Any:
        """Return the model's parameters, by the names of its checkpoint."""
        return self.model.specs(names)

    def is_unused(self, name: str) -> bool:
        """See `DrafterWeights.is_unused`."""
        return is_unused(self.model, name)

    def target_ids(self, params: Any) -> None:
        """Return None: both models have the same vocabulary."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftModelState:
    """The drafter's caches, and which requests' last accepted draft they lack."""

    caches: tuple[Any, ...]  # one per cache kind of the model
    is_behind: jax.Array  # bool[S]


@dataclass(frozen=True)
class DraftModel:
    """A drafter that runs a model, whose layers are all attention, once per draft token."""

    model: Model
    is_greedy: bool = False  # draft the argmax at any temperature

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Empty: the target's features are not used."""
        return ()

    @property
    def weights(self) -> ModelWeights:
        """The model's own."""
        return ModelWeights(self.model)

    def draft_slots(self, k: int) -> int:
        """Return 1: the row that a round runs again if the drafter is behind."""
        return 1

    def num_passes(self, k: int) -> int:
        """Return k: a pass is for one draft."""
        return k

    def init_state(self, sizes: CacheSizes, dtype: Any) -> DraftModelState:
        """Return empty caches, which are indexed by the target's page table."""
        is_behind = jnp.zeros(sizes.num_slots, bool)
        return DraftModelState(init_caches(self.model, sizes, dtype), is_behind)

    def share(self, params: Any, target: Model, target_params: Any) -> tuple["DraftModel", Any]:
        """Return the drafter unchanged: it has copies of nothing."""
        return self, params

    def draft(
        self, target: Model, params: Params, state: DraftModelState, context: DraftContext, k: int
    ) -> tuple[Draft, DraftModelState]:
        """See `Drafter.draft`."""
        caches = state.caches
        behind = state.is_behind.at[context.slots].get(mode="fill", fill_value=False)
        behind = behind.astype(jnp.int32)
        rows = context.rows_at(context.starts - behind, counts=1 + behind)
        places = context.starts[:, None] - behind[:, None] + jnp.arange(rows.width)
        tokens = jnp.take_along_axis(context.history.tokens, places, axis=1, mode="clip")
        logits, caches = self._run(params.drafter, tokens, rows, behind, caches, context)
        drafts: list[jax.Array] = []
        probs: list[jax.Array] = []
        for i in range(k):
            if i:
                rows = context.rows_at(context.starts + i)
                tokens = jnp.pad(drafts[-1][:, None], ((0, 0), (0, rows.width - 1)))
                first = jnp.zeros_like(behind)
                logits, caches = self._run(params.drafter, tokens, rows, first, caches, context)
            token, q = context.draw(
                logits, None, target.vocab_size, drafts, is_greedy=self.is_greedy
            )
            drafts.append(token)
            probs += [] if q is None else [q]
        return Draft.stacked(drafts, probs, context.slots.shape[0]), replace(state, caches=caches)

    def _run(
        self,
        params: Any,
        tokens: jax.Array,
        rows: CachedRows,
        last: jax.Array,
        caches: tuple[Any, ...],
        context: DraftContext,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Run tokens i32[B, T]; return the logits f32[B, V] of row `last` i32[B], and caches."""
        batch = tokens.shape[0]
        features, caches = self.model.extend(params, tokens.reshape(-1), rows, caches)
        hidden = rows.by_request(features.hidden)[jnp.arange(batch), last]
        padding = -batch % context.row_multiple
        return self.model.logits(params, jnp.pad(hidden, ((0, padding), (0, 0))))[:batch], caches

    def observe(
        self, target: Model, params: Params, state: DraftModelState, seen: Observation
    ) -> DraftModelState:
        """See `Drafter.observe`. Of a round `draft` has run all rows but the last draft."""
        is_behind, caches = jnp.zeros_like(seen.last, bool), state.caches
        if seen.k is None:
            tokens = seen.tokens.reshape(-1)
            _, caches = self.model.extend(params.drafter, tokens, seen.rows, caches)
        elif seen.k:
            is_behind = seen.last == seen.k
        return DraftModelState(caches, state.is_behind.at[seen.slots].set(is_behind, mode="drop"))


def load(
    folder: Path | None,
    config: SpeculativeConfig,
    target: Model,
    dtype: np.dtype,
    placement: Placement,
) -> tuple[DraftModel, Any]:
    """Load a checkpoint of any model that has the target's vocabulary, and attention only.

    Raises:
        CheckpointError: it has another vocabulary, or recurrent layers.
    """
    assert folder is not None, config.method
    model, params = load_model(folder, dtype, placement)
    if model.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{folder}: vocab_size={model.vocab_size}, the target's is {target.vocab_size}; use a "
            "draft model with the target's tokenizer"
        )
    if is_recurrent(model):
        raise CheckpointError(
            f"{folder}: a draft model with recurrent layers is not supported; use one whose layers "
            "are all attention"
        )
    return DraftModel(model, is_greedy=config.draft_sample_method == "greedy"), params
