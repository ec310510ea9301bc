"""What the step asks of a drafter: propose tokens, then observe what the target made of them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.draw_tokens import argmax
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
    """Where B requests stand when drafting starts."""

    slots: jax.Array  # i32[B]
    starts: jax.Array  # i32[B], the position of the last committed token
    is_active: jax.Array  # bool[B]
    page_table: jax.Array  # i32[B, P]
    requests: Requests  # [S], by slot: what nobody wants of it is not even gathered
    history: History  # [B]
    wants_edits: jax.Array  # bool[], whether any request has its logits edited
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
        drafts are likely to stand. The distribution f32[B, V] comes when the verification needs it:
        for drafts that are neither certain nor coupled to the target by shared noise.
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


class Drafter(Protocol):
    """A strategy as a hashable value of pure methods; its state is a pytree only it looks into."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input the drafter wants to observe."""
        ...

    def init_state(self, num_slots: int, num_pages: int, page_size: int, dtype: Any) -> Any:
        """State for `num_slots` requests over a pool of `num_pages` pages."""
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
        slots: jax.Array,
        rows: CachedRows,
        following: jax.Array,
        features: Features,
        last: jax.Array,
    ) -> Any:
        """Learn from an extension: features of its rows, the token following each (i32[B, T]), and
        the index i32[B] of each request's last row that stands.

        The beginning of a prompt may have been found in the caches, and is then never observed:
        what drafting needs of it must lie in pages, or follow from the last rows.
        """
        ...


@dataclass(frozen=True)
class NoDrafter:
    """Plain decoding."""

    aux_layers: tuple[int, ...] = ()

    def init_state(self, num_slots: int, num_pages: int, page_size: int, dtype: Any) -> None:
        """There is nothing to keep."""

    def draft(
        self, target: Model, params: Params, state: None, context: DraftContext, k: int
    ) -> tuple[Draft, None]:
        """No tokens; k must be 0."""
        if k:
            raise ValueError(f"k={k} drafts asked of an engine without a drafter")
        return Draft(jnp.zeros((context.slots.shape[0], 0), jnp.int32), None), None

    def observe(
        self,
        target: Model,
        params: Params,
        state: None,
        slots: jax.Array,
        rows: CachedRows,
        following: jax.Array,
        features: Features,
        last: jax.Array,
    ) -> None:
        """There is nothing to learn."""
