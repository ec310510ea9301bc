"""A drafter that runs a whole model, usually a small decoder (Leviathan et al. 2023).

The draft model has separate caches, in which a request has the same pages as in the target's. A
round of K drafts runs the model K times: on the last token to make the first draft, then on each
draft to make the next draft. The last draft is not run.

If the target accepts all drafts, the draft model's caches lack the last draft. The next round then
runs this draft and the last token in its first pass. The host can replace the model's drafts with
drafts from earlier texts (see `device.suggestions`). If the target accepts such drafts, the caches
can lack several tokens, and the next round's first pass runs all of them. A round without drafts
also runs the first pass, which then writes keys and values to the caches but computes no logits.

A draft model with another tokenizer maps each token of the target to its own token with the same
text, or to its unknown token. It drafts only tokens that both vocabularies have (Timor et al. 2025,
token-level intersection).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.division import Share
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.token_map import TokenMap, match
from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows
from specjax.device.drafters.drafter import DraftContext, Observation, Params
from specjax.device.drafters.head import HeadDrafter, on_rows
from specjax.device.loading import Log
from specjax.device.models.model import (
    Model,
    init_caches,
    is_recurrent,
    restore_snapshots,
    take_snapshots,
)
from specjax.device.models.registry import (
    describe_model,
    is_unused,
    load_model,
    named_specs,
    read_config,
)
from specjax.device.placement import Placement
from specjax.device.verification import Draft


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftModelParams:
    """The weights of a model, and the map between the model's tokens and the target's."""

    model: Any
    tokens: TokenMap | None = None  # None if both vocabularies are equal

    def as_own(self, tokens: jax.Array) -> jax.Array:
        """Translate token ids of the target's vocabulary to ids of the draft model's vocabulary."""
        return tokens if self.tokens is None else self.tokens.from_target[tokens]


@dataclass(frozen=True)
class ModelWeights:
    """A description of a `DraftModel`'s weights; see `DrafterWeights`."""

    model: Model
    has_embedding: bool = False
    aux_layers: tuple[int, ...] = ()
    prefix_in_target: None = None

    def specs(self, names: Collection[str] = ()) -> Any:
        """Return the model's parameters as `TensorSpec`s.

        `names` are the tensor names in the draft model's checkpoint, or a map from names to shapes.
        """
        shapes = names if isinstance(names, Mapping) else dict.fromkeys(names, ())
        return DraftModelParams(
            named_specs(self.model, shapes, lambda model, names: model.specs(names))
        )

    @property
    def num_devices(self) -> int:
        """See `Divisible`."""
        return self.model.num_devices

    @property
    def shares(self) -> Mapping[str, Share]:
        """See `Divisible`."""
        return self.model.shares

    @property
    def local(self) -> "ModelWeights":
        """See `Divisible`."""
        return replace(self, model=self.model.local)

    def is_unused(self, name: str) -> bool:
        """See `DrafterWeights.is_unused`."""
        return is_unused(self.model, name)

    def target_ids(self, params: DraftModelParams) -> jax.Array | None:
        """Return the target's ids i32[V_d] of the tokens that can be drafted.

        None if both vocabularies are equal.
        """
        return None if params.tokens is None else params.tokens.target_ids

    def logits(self, params: DraftModelParams, hidden: jax.Array) -> jax.Array:
        """Return logits f32[N, V_d] of the tokens that can be drafted, for hidden states [N, D]."""
        logits = self.model.logits(params.model, hidden)
        if params.tokens is None:
            return logits
        return self.model.vocabulary.whole(logits)[:, params.tokens.draft_ids]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftModelState:
    """The drafter's caches, and which of a request's last tokens the caches lack.

    W, the width of `ran`, is `DraftModel.max_missing` - 1.
    """

    caches: tuple[Any, ...]  # one per cache kind of the model
    snapshots: tuple[Any, ...]  # one per cache kind; None for a kind without snapshots
    num_missing: jax.Array  # i32[S], number of the last accepted drafts that were never run
    ran: jax.Array | None  # i32[S, W], drafts that the latest round ran, then -1; None if W is 0
    pending: jax.Array  # i32[S], number of accepted tokens that recurrent states lack


@dataclass(frozen=True)
class DraftModel(HeadDrafter[ModelWeights]):
    """A drafter that runs a model once per draft token.

    It makes no drafts past the draft model's maximum position.

    Attributes:
        max_missing: maximum number of accepted drafts that the caches can lack. It is 1 unless the
            host can replace the model's drafts; then it is the maximum number of drafts.
    """

    max_missing: int = 1

    @property
    def is_recurrent(self) -> bool:
        """Whether the draft model has recurrent layers."""
        return is_recurrent(self.head.model)

    @property
    def may_defer(self) -> bool:
        """False: after a round, `observe` reads no weights, so deferring it would save no time."""
        return False

    def draft_slots(self, k: int) -> int:
        """Return `max_missing`: the first pass also runs accepted drafts that the caches lack."""
        return self.max_missing

    def num_passes(self, k: int) -> int:
        """Return k: each draft takes one pass."""
        return k

    def init_state(self, sizes: CacheSizes, dtype: Any) -> DraftModelState:
        """Return a state with empty caches.

        A request has the same pages and the same slot as in the target's caches.
        """
        model, count, size = self.head.model, sizes.num_snapshots, self.max_missing - 1
        # A recurrent model runs all drafts again in each pass, after those that its state lacks.
        sizes = sizes._replace(max_rows=max(sizes.max_rows, 2 * self.max_missing))
        return DraftModelState(
            init_caches(model, sizes, dtype),
            tuple(kind.init_snapshots(count, dtype) for kind in model.cache_kinds),
            num_missing=jnp.zeros(sizes.num_slots, jnp.int32),
            ran=jnp.full((sizes.num_slots, size), -1, jnp.int32) if size else None,
            pending=jnp.zeros(sizes.num_slots, jnp.int32),
        )

    def take(
        self, state: DraftModelState, slots: jax.Array, ids: jax.Array, ends: jax.Array
    ) -> DraftModelState:
        """See `Drafter.take`."""
        stored = state.snapshots, state.caches, (slots, ids, ends)
        return replace(state, snapshots=take_snapshots(self.head.model, *stored))

    def restore(
        self, state: DraftModelState, slots: jax.Array, ids: jax.Array, ends: jax.Array
    ) -> DraftModelState:
        """See `Drafter.restore`."""
        stored = state.snapshots, state.caches, (slots, ids, ends)
        return replace(state, caches=restore_snapshots(self.head.model, *stored))

    def head_of(self, params: Params) -> Any:
        """Return the draft model's output head; None if the drafter's parameters are missing."""
        return params.drafter and params.drafter.model.head

    def with_head(self, params: Params) -> Params:
        """See `Drafter.with_head`."""
        if params.head is None:
            return params
        model = replace(params.drafter.model, lm_head=params.head)
        return params._replace(drafter=replace(params.drafter, model=model))

    def draft(
        self, target: Model, params: Params, state: DraftModelState, context: DraftContext, k: int
    ) -> tuple[Draft, DraftModelState]:
        """See `Drafter.draft`.

        A recurrent model's state must include only accepted tokens. So each pass of a recurrent
        model starts from the state before the round, and runs the last token and all previous
        drafts again.
        """
        caches, starts, first = state.caches, context.starts, self.max_missing
        missing, pending = (
            x.at[context.slots].get(mode="fill", fill_value=0)
            for x in (state.num_missing, state.pending)
        )
        own, places = params.drafter, starts[:, None] + jnp.arange(-first, 1)[None]
        tokens = jnp.take_along_axis(context.history.tokens, places, axis=1, mode="clip")
        drafts: list[jax.Array] = []
        probs: list[jax.Array] = []
        for i in range(max(k, 1)):
            is_first = i == 0 or self.is_recurrent
            num_before = i + missing if is_first else jnp.zeros_like(missing)
            rows = context.rows_at(
                starts + i - num_before,
                counts=num_before + 1,
                most=i + 1 + first if is_first else 1,
                pending=pending,
            )
            places = i + first - num_before[:, None] + jnp.arange(rows.width)[None]
            held = jnp.take_along_axis(tokens, places, axis=1, mode="clip")
            logits, caches = self._run(own, own.as_own(held), rows, num_before, caches, context)
            pending = jnp.zeros_like(pending)
            if k:
                ids = self.head.target_ids(own)
                token, q = context.draw(
                    logits, ids, target.vocab_size, drafts, is_greedy=self.is_greedy
                )
                tokens = jnp.concatenate([tokens, token[:, None]], axis=1)
                drafts.append(token)
                probs += [] if q is None else [q]
        draft, most = Draft.stacked(drafts, probs, len(starts)), self.head.model.max_position
        if most < context.history.tokens.shape[1]:  # the draft model does not know later positions
            draft = draft._replace(counts=jnp.clip(most - starts, 0, k))
        if state.ran is not None:
            size = state.ran.shape[1]
            ran = jnp.pad(draft.tokens[:, : max(k - 1, 0)], ((0, 0), (0, size)), constant_values=-1)
            state = replace(state, ran=state.ran.at[context.slots].set(ran[:, :size], mode="drop"))
        return draft, replace(state, caches=caches)

    def _run(
        self,
        params: DraftModelParams,
        tokens: jax.Array,
        rows: CachedRows,
        last: jax.Array,
        caches: tuple[Any, ...],
        context: DraftContext,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Run the draft model on `tokens` i32[B, T], ids of the draft model's vocabulary.

        `last` i32[B] is the index of a row of each request. Return the logits f32[B, V_d] of these
        rows, and the new caches.
        """
        head = self.head
        features, caches = head.model.extend(params.model, tokens.reshape(-1), rows, caches)
        hidden = rows.by_request(features.hidden)[jnp.arange(len(last)), last]
        return on_rows(partial(head.logits, params), hidden, context.row_multiple), caches

    def observe(
        self, target: Model, params: Params, state: DraftModelState, seen: Observation
    ) -> DraftModelState:
        """See `Drafter.observe`.

        The model runs here only on prefill chunks. In a round, `draft` has already run it.
        """
        caches, slots, none = state.caches, seen.slots, jnp.zeros_like(seen.last)
        if seen.k is None:
            rows = replace(seen.rows, pending=none)
            own, tokens = params.drafter, seen.tokens.reshape(-1)
            _, caches = self.head.model.extend(own.model, own.as_own(tokens), rows, caches)
            missing = pending = none
        else:
            before = state.num_missing.at[slots].get(mode="fill", fill_value=0)
            missing = self._num_missing(state, seen)
            pending = before + 1 + seen.last - missing
        return replace(
            state,
            caches=caches,
            num_missing=state.num_missing.at[slots].set(missing, mode="drop"),
            pending=state.pending.at[slots].set(pending, mode="drop"),
        )

    def _num_missing(self, state: DraftModelState, seen: Observation) -> jax.Array:
        """Return how many of each request's accepted drafts the model has not run, i32[B]."""
        assert seen.k is not None, "a chunk has no drafts"
        if state.ran is None:
            return ((seen.last == seen.k) & (seen.k > 0)).astype(seen.last.dtype)
        ran = state.ran.at[seen.slots].get(mode="fill", fill_value=-1)[:, : seen.k]
        is_same = (ran == seen.tokens[:, 1 : 1 + ran.shape[1]]).astype(seen.last.dtype)
        num_same = jnp.cumprod(is_same, axis=1).sum(axis=1)
        return jnp.minimum(seen.last - jnp.minimum(seen.last, num_same), self.max_missing)


def load(
    folder: Path | None,
    config: SpeculativeConfig,
    target: Model,
    dtype: np.dtype,
    placement: Placement,
    log: Log,
    target_folder: Path | None = None,
) -> tuple[DraftModel, DraftModelParams]:
    """Load a draft model from a checkpoint of any supported model.

    The tokenizers in `folder` and `target_folder` are compared, to map tokens. If `target_folder`
    is None, the vocabularies are assumed to be equal.

    Raises:
        CheckpointError: the vocabularies have no common token; or they differ in size, and a
            tokenizer is missing or `target_folder` is None.
    """
    assert folder is not None, config.method
    sizes = target.vocab_size, describe_model(read_config(folder)).vocab_size
    if target_folder is None and sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{folder}: vocab_size={sizes[1]} differs from the target's {sizes[0]}, and the target "
            "is a Model value, without a tokenizer to match tokens; use a draft model with the "
            "target's vocabulary"
        )
    tokens = None if target_folder is None else match((target_folder, folder), sizes)
    model, params = load_model(folder, dtype, placement, log)
    if tokens is not None:
        tokens = TokenMap(*map(placement.put, tokens))
    drafter = DraftModel(
        ModelWeights(model), config.draft_sample_method == "greedy", _max_missing(config)
    )
    return drafter, DraftModelParams(params, tokens)


def from_config(folder: Path, config: SpeculativeConfig, target: Model) -> DraftModel:
    """Return a drafter for the model that the config in `folder` describes. No weights are read.

    Raises:
        CheckpointError: the model's vocabulary size differs from the target's.
    """
    model: Any = describe_model(read_config(folder))
    if model.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{folder}: vocab_size={model.vocab_size} differs from the target's "
            f"{target.vocab_size}, and configs have no tokenizers to match tokens; use a model "
            "with the target's vocabulary"
        )
    weights = ModelWeights(replace(model, num_devices=target.num_devices))
    return DraftModel(weights, max_missing=_max_missing(config))


def _max_missing(config: SpeculativeConfig) -> int:
    return config.num_speculative_tokens if config.sources else 1
