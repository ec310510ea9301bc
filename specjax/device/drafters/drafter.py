"""The drafter interface: propose tokens, then observe the target's results for them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int32

from pallas_kernels.draw_tokens import argmax
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows, padded_width
from specjax.device.edits import History, Processors
from specjax.device.models.model import Features, Model
from specjax.device.noise import Stream
from specjax.device.requests import Requests
from specjax.device.sampling import draw_draft, process
from specjax.device.verification import Draft
from specjax.device.vocabulary import WHOLE, Vocabulary


class Params(NamedTuple):
    """Weights of a step, passed as arguments so that new weights need no recompilation."""

    target: Any
    drafter: Any


class Variant(NamedTuple):
    """Options that are compiled into a step. All other request options are in every step."""

    processors: Processors = ()
    masks: bool = False  # made when the drafts are known, so that rounds run in pieces
    num_logprobs: int = 0  # most likely tokens reported with each token, if asked for
    num_prompt_logprobs: int | None = None  # None to report nothing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftContext:
    """Input of a drafter for B requests."""

    slots: Int32[jax.Array, "B"]
    starts: Int32[jax.Array, "B"]  # the position of the last committed token
    is_active: Bool[jax.Array, "B"]
    page_table: Int32[jax.Array, "B P"]
    requests: Requests  # [S], by slot, so that only fields that are used are gathered
    history: History  # [B]
    has_edits: Bool[jax.Array, ""]  # whether any request has its logits edited
    kernels: str = field(metadata={"static": True})
    row_multiple: int = field(metadata={"static": True})
    shares_noise: bool = field(metadata={"static": True})
    variant: Variant = field(metadata={"static": True})
    vocabulary: Vocabulary = field(default=WHOLE, metadata={"static": True})

    def rows_at(
        self,
        starts: jax.Array,
        *,
        counts: jax.Array | int = 1,
        most: int = 1,
        writes: bool = True,
        pending: jax.Array | None = None,
    ) -> CachedRows:
        """Return rows from position starts[b]: counts[b] real ones, at most `most`, then padding.

        `pending` i32[B] is for recurrent states, see `CachedRows`.
        """
        return CachedRows.starting_at(
            starts,
            self.is_active.astype(starts.dtype) * counts,
            padded_width(starts.shape[0], most, self.row_multiple),
            self.page_table,
            slots=self.slots,
            pending=pending,
            writes=writes,
            kernels=self.kernels,
        )

    def draw(
        self,
        logits: jax.Array,
        token_ids: jax.Array | None,
        vocab_size: int,
        before: list[jax.Array],
        *,
        is_greedy: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the draft i32[B] after the drafts `before`, and the distribution sampled from.

        Logits f32[B, V_d] over `token_ids` (None for all) are edited like the target's, so that
        drafts are likely to be accepted. The distribution is f32[B, V], or None for drafts that
        are greedy or use the target's noise, where verification does not need it.
        """

        def choose(logits):
            return self._choose(logits, token_ids, vocab_size, len(before), is_greedy)

        def choose_edited(logits):
            return self._choose_edited(logits, token_ids, vocab_size, before, is_greedy)

        return self._through_edits(choose_edited, choose, logits)

    def draw_together(
        self, logits: jax.Array, token_ids: jax.Array | None, vocab_size: int, *, is_greedy: bool
    ) -> Draft:
        """Return the drafts of logits f32[B, K, V_d] that do not depend on each other, as `draw`
        would. Only edits, which depend on the drafts before, take them one after the other.
        """
        batch, k, _ = logits.shape

        def choose(logits):
            rows = logits.reshape(batch * k, -1)
            tokens, q = self._choose(rows, token_ids, vocab_size, 0, is_greedy)
            return Draft(tokens.reshape(batch, k), None if q is None else q.reshape(batch, k, -1))

        def choose_edited(logits):
            drafts: list[jax.Array] = []
            probs: list[jax.Array] = []
            for i in range(k):
                token, q = self._choose_edited(
                    logits[:, i], token_ids, vocab_size, drafts, is_greedy
                )
                drafts.append(token)
                probs += [] if q is None else [q]
            return Draft.stacked(drafts, probs, batch)

        return self._through_edits(choose_edited, choose, logits)

    def _through_edits(
        self,
        edited: Callable[[jax.Array], Any],
        unedited: Callable[[jax.Array], Any],
        logits: jax.Array,
    ) -> Any:
        if self.variant.processors:
            return edited(logits)
        return jax.lax.cond(self.has_edits, edited, unedited, logits)

    def _choose(
        self,
        logits: jax.Array,
        token_ids: jax.Array | None,
        vocab_size: int,
        first: int,
        is_greedy: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the drafts i32[B T] of logits f32[B T, V_d]: T of each request from the one with
        number `first` on; and the distributions f32[B T, V] or None, see `draw`."""
        if is_greedy:
            if token_ids is None:
                return jnp.maximum(self.vocabulary.argmax(logits), 0), None
            return token_ids[jnp.maximum(argmax(logits), 0)], None
        count, sampling = len(logits) // len(self.starts), self.requests.at(self.slots).sampling
        if self.shares_noise:
            stream, counters = Stream.TARGET, (self.starts + 1 + first,)
        else:
            # Keyed by the round and not by position alone: see `verification._coins`.
            sampling, starts = sampling.repeat(count), jnp.repeat(self.starts, count)
            numbers = jnp.tile(first + jnp.arange(count, dtype=starts.dtype), len(self.starts))
            stream, counters = Stream.DRAFT, (starts, numbers)
        return draw_draft(
            logits,
            token_ids,
            vocab_size,
            sampling,
            stream,
            counters,
            wants_probs=not self.shares_noise,
            vocabulary=self.vocabulary,
            kernels=self.kernels,
        )

    def _choose_edited(
        self,
        logits: jax.Array,
        token_ids: jax.Array | None,
        vocab_size: int,
        before: list[jax.Array],
        is_greedy: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the draft after `before` of logits f32[B, V_d], edited; see `draw`."""
        if token_ids is not None:
            logits = self.vocabulary.spread(logits, token_ids, vocab_size)
        history = self.history.extended(before)
        arguments = self.requests.at(self.slots), history, self.variant.processors
        edited = process(
            logits[:, None], *arguments, vocabulary=self.vocabulary, kernels=self.kernels
        )
        return self._choose(edited[:, 0], None, vocab_size, len(before), is_greedy)


class Observation(NamedTuple):
    """Rows that the target ran for B requests: a chunk of a prompt, or last token and drafts."""

    slots: Int32[jax.Array, "B"]
    rows: CachedRows  # [N], their positions, pages and slots
    tokens: Int32[jax.Array, "B T"]  # the rows' tokens
    following: Int32[jax.Array, "B T"]  # the token after each: known, or sampled by the target
    features: Features  # [N], of the target
    last: Int32[jax.Array, "B"]  # index of each request's last accepted row
    k: int | None  # draft tokens of the round; None for a chunk


class DrafterWeights(Protocol):
    """A description of a drafter's weights, for loading and updating them."""

    @property
    def prefix_in_target(self) -> str | None:
        """Prefix of its tensors in the target's checkpoint; None if they are not in it."""
        ...

    def specs(self, names: Collection[str] = ()) -> Any:
        """Return the float weights as a tree of `TensorSpec`; see `Model.specs`."""
        ...

    def is_unused(self, name: str) -> bool:
        """Return whether a tensor is allowed among the weights although it is not used."""
        ...

    def target_ids(self, params: Any) -> jax.Array | None:
        """Return the target's token id of each draft logit, i32[V_d]; None if they are the same."""
        ...


class Drafter(Protocol):
    """A drafting strategy: hashable, with pure methods; its state is a pytree only it reads."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input the drafter observes."""
        ...

    @property
    def weights(self) -> DrafterWeights | None:
        """Description of the drafter's weights; None for a drafter without weights."""
        ...

    @property
    def is_recurrent(self) -> bool:
        """Whether a request has a state in it that no later rows give, so that reusing pages alone
        does not save observing their tokens."""
        ...

    @property
    def may_defer(self) -> bool:
        """Whether it may observe the rows of rounds without drafts later, several at once, as the
        rows of a chunk. It is worth the while if observing reads weights."""
        ...

    def draft_slots(self, k: int) -> int:
        """Return how many rows drafting k tokens adds per request to the budget of a step."""
        ...

    def num_passes(self, k: int) -> int:
        """Return how often drafting k tokens reads the drafter's weights and cache."""
        ...

    def init_state(self, sizes: CacheSizes, dtype: Any) -> Any:
        """Return an empty state for the target's numbers of requests and pages.

        `dtype` is that of the model; pages have that of `sizes`, if it has one.
        """
        ...

    def take(self, state: Any, slots: jax.Array, ids: jax.Array, ends: jax.Array) -> Any:
        """Return the state with snapshots `ids` of its recurrent states, see `CacheKind.take`."""
        ...

    def restore(self, state: Any, slots: jax.Array, ids: jax.Array, ends: jax.Array) -> Any:
        """Return the state with its recurrent states as in these snapshots."""
        ...

    def share(self, params: Any, target: Model, target_params: Any) -> tuple["Drafter", Any]:
        """Return the drafter and its parameters without copies of the target's parameters."""
        ...

    def draft(
        self, target: Model, params: Params, state: Any, context: DraftContext, k: int
    ) -> tuple[Draft, Any]:
        """Return k tokens for the positions after each request's last token, and the state."""
        ...

    def observe(
        self,
        target: Model,
        params: Params,
        state: Any,
        seen: Observation,
    ) -> Any:
        """Return the state for the next drafts, updated with rows that the target ran.

        The beginning of a prompt is never observed if it was found in the prefix cache: what
        drafting needs of it must be in the pages, follow from the last rows, or be restored.
        """
        ...


@dataclass(frozen=True)
class NotRecurrent:
    """Base of drafters without a recurrent state."""

    @property
    def is_recurrent(self) -> bool:
        """False: pages and the last rows are all that drafting needs."""
        return False

    def take(self, state: Any, slots: jax.Array, ids: jax.Array, ends: jax.Array) -> Any:
        """Return the state unchanged."""
        return state

    def restore(self, state: Any, slots: jax.Array, ids: jax.Array, ends: jax.Array) -> Any:
        """Return the state unchanged."""
        return state


@dataclass(frozen=True)
class Stateless(NotRecurrent):
    """Base of drafters that have no weights and read only tokens."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Empty: the target's features are not used."""
        return ()

    @property
    def weights(self) -> None:
        """None: there are no weights."""

    @property
    def may_defer(self) -> bool:
        """False: nothing is observed."""
        return False

    def draft_slots(self, k: int) -> int:
        """Return 0: drafting runs no rows."""
        return 0

    def num_passes(self, k: int) -> int:
        """Return 0: there are no weights."""
        return 0

    def init_state(self, sizes: CacheSizes, dtype: Any) -> None:
        """Return None: there is no state."""

    def share(self, params: None, target: Model, target_params: Any) -> tuple[Self, None]:
        """Return the drafter unchanged: it has no parameters."""
        return self, None

    def observe(self, target: Model, params: Params, state: None, seen: Observation) -> None:
        """Return None: the history has the tokens."""


@dataclass(frozen=True)
class NoDrafter(Stateless):
    """The drafter of plain decoding, which drafts nothing."""

    def draft(
        self, target: Model, params: Params, state: None, context: DraftContext, k: int
    ) -> tuple[Draft, None]:
        """Return no tokens; k must be 0."""
        if k:
            raise ValueError(f"k={k} drafts asked of an engine without a drafter")
        return Draft(jnp.zeros((context.slots.shape[0], 0), jnp.int32), None), None
