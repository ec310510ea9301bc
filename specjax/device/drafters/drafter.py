"""What the step asks of a drafter: propose tokens, then observe what the target made of them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax

from specjax.device.cache.paged import PagedRows, padded_width
from specjax.device.models.model import Features, Model
from specjax.device.sampling import Sampling


class Params(NamedTuple):
    """Weights of a step. They are arguments: another tree is another set of weights, no compile."""

    target: Any
    drafter: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftContext:
    """Where B requests stand when drafting starts."""

    slots: jax.Array  # i32[B]
    lengths: jax.Array  # i32[B], tokens in the caches: the position of the last token
    is_active: jax.Array  # bool[B]
    page_table: jax.Array  # i32[B, P]
    sampling: Sampling  # [B]
    kernels: str = field(metadata={"static": True})
    row_multiple: int = field(metadata={"static": True})

    def rows_at(self, starts: jax.Array) -> PagedRows:
        """One real row per request at position starts[b], then padding."""
        width = padded_width(starts.shape[0], 1, self.row_multiple)
        counts = self.is_active.astype(starts.dtype)
        return PagedRows.starting_at(starts, counts, width, self.page_table, self.kernels)


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
    ) -> tuple[jax.Array, Any]:
        """k tokens i32[B, k] for the positions after each request's last token, and the state."""
        ...

    def observe(
        self,
        target: Model,
        params: Params,
        state: Any,
        slots: jax.Array,
        rows: PagedRows,
        following: jax.Array,
        features: Features,
        last: jax.Array,
    ) -> Any:
        """Learn from an extension: features of its rows, the token following each (i32[B, T]), and
        the index i32[B] of each request's last row that stands."""
        ...


@dataclass(frozen=True)
class NoDrafter:
    """Plain decoding."""

    aux_layers: tuple[int, ...] = ()

    def init_state(self, num_slots: int, num_pages: int, page_size: int, dtype: Any) -> None:
        """There is nothing to keep."""

    def draft(
        self, target: Model, params: Params, state: None, context: DraftContext, k: int
    ) -> tuple[jax.Array, None]:
        """No tokens; k must be 0."""
        if k:
            raise ValueError(f"k={k} drafts asked of an engine without a drafter")
        return jax.numpy.zeros((context.slots.shape[0], 0), jax.numpy.int32), None

    def observe(
        self,
        target: Model,
        params: Params,
        state: None,
        slots: jax.Array,
        rows: PagedRows,
        following: jax.Array,
        features: Features,
        last: jax.Array,
    ) -> None:
        """There is nothing to learn."""
