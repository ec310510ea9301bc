"""What the step asks of a drafter: propose tokens, then observe what the target made of them."""

from collections.abc import Collection
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
from specjax.device.sampling import draw_draft, process, spread
from specjax.device.verification import Draft


class Params(NamedTuple):
    """Weights of a step. They are arguments: another tree is another set of weights, no compile."""

    target: Any
    drafter: Any


class Variant(NamedTuple):
    """What a step does that is compiled in. All else that requests may want waits in every step."""

    processors: Processors = ()
    masks: bool = False  # grammars, by masks that arrive after the drafts are known
    num_logprobs: int = 0  # likeliest tokens reported beside each, where they are wanted
    num_prompt_logprobs: int | None = None  # None reports nothing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftContext:
    """What a drafter is given of B requests when drafting starts."""

    slots: Int32[jax.Array, "B"]
    starts: Int32[jax.Array, "B"]  # the position of the last committed token
    is_active: Bool[jax.Array, "B"]
    page_table: Int32[jax.Array, "B P"]
    requests: Requests  # [S], by slot: what nobody wants of it is not even gathered
    history: History  # [B]
    wants_edits: Bool[jax.Array, ""]  # whether any request has its logits edited
    kernels: str = field(metadata={"static": True})
    row_multiple: int = field(metadata={"static": True})
    shares_noise: bool = field(metadata={"static": True})
    variant: Variant = field(metadata={"static": True})

    def rows_at(self, starts: jax.Array, *, writes: bool = True) -> CachedRows:
        """One real row per request at position starts[b], then padding."""
        width = padded_width(starts.shape[0], 1, self.row_multiple)
        counts = self.is_active.astype(starts.dtype)
        return CachedRows.starting_at(
            starts, counts, width, self.page_table, writes=writes, kernels=self.kernels
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
        """The draft i32[B] that follows the drafts `before`, and what it was drawn from.

        Logits f32[B, V_d] over `token_ids` (None for all) pass what the target's will, so that
        drafts are likely to be accepted. The distribution f32[B, V] is returned where the
        verification needs it: not for drafts that are certain, or drawn with the target's noise.
        """
        sampling = self.requests.at(self.slots).sampling
        step = len(before)
        if self.shares_noise:
            stream, counters = Stream.TARGET, (self.starts + 1 + step,)
        else:
            # Keyed by the round, too: see `verification._coins`.
            stream, counters = Stream.DRAFT, (self.starts, jnp.full_like(self.starts, step))

        def choose(logits, token_ids=token_ids):
            if is_greedy:
                best = argmax(logits)
                return (best if token_ids is None else token_ids[best]), None
            return draw_draft(
                logits,
                token_ids,
                vocab_size,
                sampling,
                stream,
                counters,
                wants_probs=not self.shares_noise,
                kernels=self.kernels,
            )

        def choose_edited(logits):
            if token_ids is not None:
                logits = spread(logits, token_ids, vocab_size)
            history = self.history.extended(before)
            arguments = self.requests.at(self.slots), history, self.variant.processors
            edited = process(logits[:, None], *arguments, kernels=self.kernels)
            return choose(edited[:, 0], None)

        if self.variant.processors:
            return choose_edited(logits)
        return jax.lax.cond(self.wants_edits, choose_edited, choose, logits)


class Observation(NamedTuple):
    """Rows that the target ran for B requests: a chunk of a prompt, or last token and drafts."""

    slots: Int32[jax.Array, "B"]
    rows: CachedRows  # [N], their positions, pages and slots
    tokens: Int32[jax.Array, "B T"]  # what they held
    following: Int32[jax.Array, "B T"]  # the token after each: known, or drawn by the target
    features: Features  # [N], what the target made of them
    last: Int32[jax.Array, "B"]  # the index of each request's last row that was accepted


class DrafterWeights(Protocol):
    """What an update of a drafter's weights asks about them."""

    @property
    def prefix_in_target(self) -> str | None:
        """How the names of its tensors begin among the target's; None if they are not there."""
        ...

    def specs(self, names: Collection[str] = ()) -> Any:
        """The float weights as a tree of `TensorSpec`; see `Model.specs`."""
        ...

    def is_unused(self, name: str) -> bool:
        """Whether a tensor may lie among the weights, and is not one of them."""
        ...

    def target_ids(self, params: Any) -> jax.Array | None:
        """The target's token id of each draft logit, i32[V_d]; None when they are the same."""
        ...


class Drafter(Protocol):
    """A strategy as a hashable value of pure methods; its state is a pytree only it looks into."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input the drafter wants to observe."""
        ...

    @property
    def weights(self) -> DrafterWeights | None:
        """The drafter's weights by their published names; None for a drafter without weights."""
        ...

    def draft_slots(self, k: int) -> int:
        """Rows that drafting k tokens adds to a request's own in the budget of a step."""
        ...

    def init_state(self, sizes: CacheSizes, dtype: Any) -> Any:
        """An empty state for so many requests and pages, which are the target's."""
        ...

    def share(self, params: Any, target: Model, target_params: Any) -> tuple["Drafter", Any]:
        """The drafter and its parameters without copies of what the target has already."""
        ...

    def draft(
        self, target: Model, params: Params, state: Any, context: DraftContext, k: int
    ) -> tuple[Draft, Any]:
        """k tokens for the positions after each request's last token, and the state."""
        ...

    def observe(
        self,
        target: Model,
        params: Params,
        state: Any,
        seen: Observation,
    ) -> Any:
        """Learn from rows that the target ran: the state from which the next tokens are drafted.

        The beginning of a prompt may have been found in the caches, and is then never observed:
        what drafting needs of it must lie in pages, or follow from the last rows.
        """
        ...


@dataclass(frozen=True)
class Stateless:
    """What drafters have in common that have no weights, and look at tokens only."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's features are not looked at."""
        return ()

    @property
    def weights(self) -> None:
        """There are none."""

    def draft_slots(self, k: int) -> int:
        """Drafting runs no rows."""
        return 0

    def init_state(self, sizes: CacheSizes, dtype: Any) -> None:
        """There is nothing to keep."""

    def share(self, params: None, target: Model, target_params: Any) -> tuple[Self, None]:
        """There is nothing to share."""
        return self, None

    def observe(self, target: Model, params: Params, state: None, seen: Observation) -> None:
        """There is nothing to learn: the tokens are in the history."""


@dataclass(frozen=True)
class NoDrafter(Stateless):
    """Plain decoding."""

    def draft(
        self, target: Model, params: Params, state: None, context: DraftContext, k: int
    ) -> tuple[Draft, None]:
        """No tokens; k must be 0."""
        if k:
            raise ValueError(f"k={k} drafts asked of an engine without a drafter")
        return Draft(jnp.zeros((context.slots.shape[0], 0), jnp.int32), None), None
