"""Base classes of drafters with weights, and the interface of their models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp

from specjax.checkpoint.division import Share
from specjax.device.drafters.checkpoint import without_shared_embedding
from specjax.device.drafters.drafter import DraftContext, DrafterWeights, NotRecurrent, Params
from specjax.device.models.model import Model
from specjax.device.verification import Draft


class DraftHead(DrafterWeights, Protocol):
    """The interface of a drafter's model.

    The model is a hashable value. Its weights are passed to its methods as arguments.
    """

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Indices of the target's layers. The head reads the inputs of these layers."""
        ...

    @property
    def has_embedding(self) -> bool:
        """Whether the weights include an `embedding`.

        `HeadDrafter.share` removes an unquantised embedding that equals the target's.
        """
        ...


@dataclass(frozen=True)
class ShapedHead:
    """The base class of draft heads that have the layers of the decoder `shape`.

    A head is divided over devices in the same way as this decoder.
    """

    shape: Any

    @property
    def num_devices(self) -> int:
        """See `Divisible`."""
        return self.shape.num_devices

    @property
    def shares(self) -> Mapping[str, Share]:
        """See `Divisible`."""
        return self.shape.shares

    @property
    def local(self) -> Self:
        """See `Divisible`."""
        return replace(self, shape=self.shape.local)


HeadT = TypeVar("HeadT", bound=DraftHead)


@dataclass(frozen=True)
class HeadDrafter(NotRecurrent, Generic[HeadT]):
    """The base class of drafters that run a model, `head`."""

    head: HeadT
    is_greedy: bool = False  # whether to draft the argmax at any temperature

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Indices of the target's layers. The head reads the inputs of these layers."""
        return self.head.aux_layers

    @property
    def weights(self) -> HeadT:
        """See `Drafter.weights`. The head itself is the description."""
        return self.head

    @property
    def may_defer(self) -> bool:
        """True: a single call of `observe` can take the rows of several rounds.

        This is correct for most heads, because the keys and values that they compute for a row do
        not depend on later rows.
        """
        return True

    @property
    def local(self) -> Self:
        """See `Drafter.local`."""
        return replace(self, head=self.head.local)

    def draft_slots(self, k: int) -> int:
        """Return 0: drafting needs no more rows per request than verification."""
        return 0

    def num_passes(self, k: int) -> int:
        """Return 1, or 0 if k is 0: most heads make all drafts in one pass."""
        return min(k, 1)

    def share(self, params: Any, target: Model, target_params: Any) -> tuple[Self, Any]:
        """Remove an unquantised embedding that equals the target's; see `Drafter.share`."""
        head, params = without_shared_embedding(self.head, params, target, target_params)
        return replace(self, head=head), params

    def head_of(self, params: Params) -> Any:
        """Return the target's output head; None if the target's parameters are missing."""
        return params.target and params.target.head

    def with_head(self, params: Params) -> Params:
        """See `Drafter.with_head`."""
        if params.head is None:
            return params
        return params._replace(target=replace(params.target, lm_head=params.head))

    def draw_each(
        self,
        target: Model,
        params: Params,
        context: DraftContext,
        k: int,
        logits_of: Callable[[int, Sequence[jax.Array]], jax.Array],
    ) -> Draft:
        """Draw k drafts one after the other.

        `logits_of(i, drafts)` returns the logits f32[B, V_d] of draft i. `drafts` holds the i
        drafts already drawn, i32[B] each.
        """
        ids = self.head.target_ids(params.drafter)
        drafts: list[jax.Array] = []
        probs: list[jax.Array] = []
        for i in range(k):
            row = logits_of(i, drafts)
            token, q = context.draw(row, ids, target.vocab_size, drafts, is_greedy=self.is_greedy)
            drafts.append(token)
            probs += [] if q is None else [q]
        return Draft.stacked(drafts, probs, len(context.starts))

    def draw_together(
        self, target: Model, params: Params, context: DraftContext, logits: jax.Array
    ) -> Draft:
        """Draw K independent drafts per request from `logits` f32[B, K, V_d]."""
        ids = self.head.target_ids(params.drafter)
        return context.draw_together(logits, ids, target.vocab_size, is_greedy=self.is_greedy)


def on_rows(apply: Callable[[jax.Array], jax.Array], x: jax.Array, multiple: int) -> jax.Array:
    """Return `apply(x)` for rows x [N, D].

    `apply` is called with padding rows after x, so that the number of rows is a multiple of
    `multiple`. The results of padding rows are dropped.
    """
    return apply(jnp.pad(x, ((0, -len(x) % multiple), (0, 0))))[: len(x)]
