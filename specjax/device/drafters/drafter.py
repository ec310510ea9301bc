"""The interface of drafters, which propose draft tokens and then observe the target's results."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int32

from pallas_kernels.draw_tokens import argmax
from specjax.checkpoint.division import Share
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows, padded_width
from specjax.device.edits import History, Processors, apply_processors
from specjax.device.models.model import Features, Model
from specjax.device.noise import Stream
from specjax.device.requests import Requests
from specjax.device.sampling import draw_draft, process
from specjax.device.verification import Draft
from specjax.device.vocabulary import WHOLE, Vocabulary


class Params(NamedTuple):
    """The weights that a step uses.

    They are arguments of the step's program, so new weights need no compilation.
    """

    target: Any
    drafter: Any
    # The drafter's 8-bit copy of a shared output head (see `Drafter.head_of`); None without a copy.
    head: Any = None


class Variant(NamedTuple):
    """Request options that are compiled into a step only if a request needs them.

    Every step supports all other options.
    """

    processors: Processors = ()
    # Whether grammars mask tokens. Masks depend on the drafts, so a round runs as several programs.
    masks: bool = False
    num_logprobs: int = 0  # number of most likely tokens reported with each token
    num_prompt_logprobs: int | None = None  # the same for prompt tokens; None: nothing is reported
    is_plain: bool = False  # whether the work in `Extras` is left out of the program


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftContext:
    """The input of a drafter for B requests."""

    slots: Int32[jax.Array, "B"]
    starts: Int32[jax.Array, "B"]  # the position of the last committed token
    is_active: Bool[jax.Array, "B"]
    page_table: Int32[jax.Array, "B P"]
    requests: Requests  # [S], by slot; drafters gather only the fields that they use
    history: History  # [B]
    has_edits: Bool[jax.Array, ""]  # whether any request edits its logits
    kernels: str = field(metadata={"static": True})
    row_multiple: int = field(metadata={"static": True})  # see `StepModel`
    shares_noise: bool = field(metadata={"static": True})  # whether drafts use the target's noise
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
        """Return rows of each request at consecutive positions, followed by padding rows.

        Request b has `counts[b]` rows, beginning at position `starts[b]`; `most` is the largest
        count. Inactive requests have only padding rows. `pending` i32[B] and `writes` are explained
        in `CachedRows`. Only recurrent states need `pending`.
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
        """Draw one draft per request; return the drafts i32[B] and their distributions f32[B, V].

        `before` holds the drafts already drawn in this round, i32[B] each. `token_ids` i32[V_d]
        holds the token of each column of `logits` f32[B, V_d]; None if all tokens have columns. To
        make acceptance likelier, `logits` are edited like the target's, but without grammar masks.

        The distributions are None if verification does not need them: for greedy drafts, and for
        drafts drawn with the random numbers that the target uses.
        """

        def choose(logits):
            return self._choose(logits, token_ids, vocab_size, len(before), is_greedy)

        def choose_edited(logits):
            return self._choose_edited(logits, token_ids, vocab_size, before, is_greedy)

        return self._through_edits(choose_edited, choose, logits)

    def draw_together(
        self, logits: jax.Array, token_ids: jax.Array | None, vocab_size: int, *, is_greedy: bool
    ) -> Draft:
        """Draw K independent drafts per request from `logits` f32[B, K, V_d]; see `draw`.

        Drafts are drawn one after the other only if logits are edited, because the edits of a
        draft's logits depend on the drafts before it.
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
        if self.variant.is_plain:
            return unedited(logits)
        return jax.lax.cond(self.has_edits, edited, unedited, logits)

    def _choose(
        self,
        logits: jax.Array,
        token_ids: jax.Array | None,
        vocab_size: int,
        first: int,
        is_greedy: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return T drafts per request, i32[B T], and their distributions f32[B T, V] or None.

        `logits` f32[B T, V_d] has T rows per request. `first` is the number of drafts that each
        request already has in this round. The other arguments are explained in `draw`.
        """
        if is_greedy:
            if token_ids is None:
                return jnp.maximum(self.vocabulary.argmax(logits), 0), None
            return token_ids[jnp.maximum(argmax(logits), 0)], None
        count, sampling = len(logits) // len(self.starts), self.requests.at(self.slots).sampling
        if self.shares_noise:
            stream, counters = Stream.TARGET, (self.starts + 1 + first,)
        else:
            # The key includes the round's start, not only the position: see `verification._coins`.
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
        """Edit `logits` f32[B, V_d], then draw the draft after the drafts `before`; see `draw`."""
        if token_ids is not None:
            logits = self.vocabulary.spread(logits, token_ids, vocab_size)
        history = self.history.extended(before)
        asked, vocabulary = (self.requests.at(self.slots), history), self.vocabulary
        rows = apply_processors(logits[:, None], *asked, self.variant.processors, vocabulary)
        edited = process(rows, *asked, vocabulary=vocabulary, kernels=self.kernels)
        return self._choose(edited[:, 0], None, vocab_size, len(before), is_greedy)


class Observation(NamedTuple):
    """The rows that the target ran for B requests, and the target's results for them.

    The rows of each request are a prefill chunk, or its last token and the drafts after it.
    """

    slots: Int32[jax.Array, "B"]
    rows: CachedRows  # [N], positions, pages and slots
    tokens: Int32[jax.Array, "B T"]  # the rows' tokens
    following: Int32[jax.Array, "B T"]  # the token after each row, known or sampled by the target
    features: Features  # [N], of the target
    last: Int32[jax.Array, "B"]  # index of each request's last accepted row
    k: int | None  # number of drafts per request in the round; None for a chunk


class DrafterWeights(Protocol):
    """Describes a drafter's weights, so that they can be loaded and updated."""

    @property
    def prefix_in_target(self) -> str | None:
        """The name prefix of the drafter's tensors in the target's checkpoint.

        None if they are in another checkpoint.
        """
        ...

    def specs(self, names: Collection[str] = ()) -> Any:
        """Return the weights, except the map `target_ids`, as `TensorSpec`s; see `Model.specs`."""
        ...

    def is_unused(self, name: str) -> bool:
        """Return whether a tensor `name` that the checkpoint has, but `specs` lack, is ignored."""
        ...

    @property
    def num_devices(self) -> int:
        """See `Divisible`."""
        ...

    @property
    def shares(self) -> Mapping[str, Share]:
        """See `Divisible`."""
        ...

    @property
    def local(self) -> Self:
        """See `Divisible`."""
        ...

    def target_ids(self, params: Any) -> jax.Array | None:
        """Return the target's token id of each draft logit, i32[V_d]; None if ids are the same."""
        ...


class Drafter(Protocol):
    """The interface of drafters. A drafter is a hashable value with pure methods.

    The drafter's state is a pytree that no other code reads.
    """

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose input the drafter observes."""
        ...

    @property
    def weights(self) -> DrafterWeights | None:
        """Description of the drafter's weights; None for a drafter without weights."""
        ...

    @property
    def is_recurrent(self) -> bool:
        """Whether drafting needs a state that a request's pages and last tokens do not determine.

        If so, a request can reuse a cached prefix only if a snapshot of the state at the prefix's
        end is restored.
        """
        ...

    @property
    def may_defer(self) -> bool:
        """Whether one call of `observe` can take the rows of several rounds without drafts.

        This saves time only if `observe` reads weights.
        """
        ...

    @property
    def local(self) -> Self:
        """The drafter that each device runs, with a part of the weights (see `Divisible`)."""
        ...

    def draft_slots(self, k: int) -> int:
        """Return the number of rows per request that drafting needs beyond the target's k + 1."""
        ...

    def num_passes(self, k: int) -> int:
        """Return how often drafting k tokens reads the drafter's weights and cache."""
        ...

    def init_state(self, sizes: CacheSizes, dtype: Any) -> Any:
        """Return an empty state. `sizes` are the sizes of the target's caches.

        `dtype` is the model's dtype. If `sizes.page_format` is set, pages have that format instead.
        """
        ...

    def take(self, state: Any, slots: jax.Array, ids: jax.Array, ends: jax.Array) -> Any:
        """Copy requests' recurrent states to snapshots; return the new state.

        The arguments are explained in `CacheKind.take`.
        """
        ...

    def restore(self, state: Any, slots: jax.Array, ids: jax.Array, ends: jax.Array) -> Any:
        """Copy snapshots to requests' recurrent states; return the new state. See `take`."""
        ...

    def share(self, params: Any, target: Model, target_params: Any) -> tuple["Drafter", Any]:
        """Return drafter and parameters, without an unquantised embedding equal to the target's."""
        ...

    def head_of(self, params: Params) -> Any:
        """Return the weight that a drafter without its own output head uses as output head.

        It is the target's head, or a draft model's embedding; None if `params` lack this weight. Do
        not call this method if the drafter has its own output head.
        """
        ...

    def with_head(self, params: Params) -> Params:
        """Return `params` with `params.head`, if it is not None, as the drafter's output head."""
        ...

    def draft(
        self, target: Model, params: Params, state: Any, context: DraftContext, k: int
    ) -> tuple[Draft, Any]:
        """Return drafts of the k tokens after each request's last token, and the new state."""
        ...

    def observe(
        self,
        target: Model,
        params: Params,
        state: Any,
        seen: Observation,
    ) -> Any:
        """Return the state for the next drafts, updated with the rows `seen` that the target ran.

        Tokens found in the prefix cache are never observed. The information that drafting needs
        from these tokens must be in the pages, follow from the request's last tokens, or be
        restored from a snapshot.
        """
        ...


@dataclass(frozen=True)
class NotRecurrent:
    """The base class of drafters without a recurrent state."""

    @property
    def is_recurrent(self) -> bool:
        """False: a request's pages and last tokens determine all that drafting needs."""
        return False

    def take(self, state: Any, slots: jax.Array, ids: jax.Array, ends: jax.Array) -> Any:
        """Return the state unchanged."""
        return state

    def restore(self, state: Any, slots: jax.Array, ids: jax.Array, ends: jax.Array) -> Any:
        """Return the state unchanged."""
        return state


@dataclass(frozen=True)
class Stateless(NotRecurrent):
    """The base class of drafters that have no weights and no state, and read only tokens."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Empty: the target's features are not used."""
        return ()

    @property
    def weights(self) -> None:
        """None: there are no weights."""

    @property
    def may_defer(self) -> bool:
        """False: `observe` does nothing."""
        return False

    @property
    def local(self) -> Self:
        """This drafter, because every device drafts the same tokens."""
        return self

    def draft_slots(self, k: int) -> int:
        """Return 0: drafting runs no rows."""
        return 0

    def num_passes(self, k: int) -> int:
        """Return 0: drafting reads neither weights nor a cache."""
        return 0

    def init_state(self, sizes: CacheSizes, dtype: Any) -> None:
        """Return None: there is no state."""

    def share(self, params: None, target: Model, target_params: Any) -> tuple[Self, None]:
        """Return the drafter unchanged: it has no parameters."""
        return self, None

    def head_of(self, params: Params) -> None:
        """Return None: drafting computes no logits."""

    def with_head(self, params: Params) -> Params:
        """Return `params` unchanged."""
        return params

    def observe(self, target: Model, params: Params, state: None, seen: Observation) -> None:
        """Return None: there is no state to update."""


@dataclass(frozen=True)
class NoDrafter(Stateless):
    """The drafter of plain decoding, which drafts nothing."""

    def draft(
        self, target: Model, params: Params, state: None, context: DraftContext, k: int
    ) -> tuple[Draft, None]:
        """Return a draft of length 0; `k` must be 0."""
        if k:
            raise ValueError(f"k={k}: an engine without a drafter cannot draft; k must be 0")
        return Draft(jnp.zeros((context.slots.shape[0], 0), jnp.int32), None), None
