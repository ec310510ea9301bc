"""The inputs of a step's programs, and the static model that is compiled into the programs."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from specjax.device.drafters.drafter import Drafter
from specjax.device.models.model import Model
from specjax.device.packing import packed
from specjax.device.requests import Requests, init_requests
from specjax.device.suggestions import Suggestions
from specjax.device.verification import Verification
from specjax.device.vocabulary import WHOLE, Vocabulary


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdmitInputs:
    """Requests to admit, each with the slot (index in the engine's state) that it gets."""

    slots: Int32[jax.Array, "B"] = packed("num_slots")  # out of range for a padding row
    requests: Requests = packed(lambda layout: init_requests(1, layout.vocab_size, xp=np))  # [B]
    # The prompt and the output so far, padded with -1.
    tokens: Int32[jax.Array, "B L"] = packed(-1, "max_model_len")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SnapshotInputs:
    """The copies to make from recurrent states of requests to snapshots, or back."""

    slots: Int32[jax.Array, "B"] = packed("num_slots")  # out of range for a padding row
    ids: Int32[jax.Array, "B"] = packed("num_snapshots")  # snapshots; out of range for padding
    ends: Int32[jax.Array, "B"] = packed(0)  # number of tokens that the states include


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillInputs:
    """One chunk from each of B prompts."""

    slots: Int32[jax.Array, "B"] = packed("num_slots")  # out of range for a padding row
    starts: Int32[jax.Array, "B"] = packed(0)  # number of tokens already in the caches
    counts: Int32[jax.Array, "B"] = packed(0)  # number of tokens in this chunk
    is_last: Int32[jax.Array, "B"] = packed(0)  # 1 for a request's last chunk
    is_resumed: Int32[jax.Array, "B"] = packed(0)  # 1 if the token after the last chunk is known
    extras: Int32[jax.Array, "B"] = packed(0)  # `Extras` that any request needs; equal in all rows
    # The page table for layers without separate pages, then one page table per window.
    page_tables: Int32[jax.Array, "B GP"] = packed(-1, "table_width")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeInputs:
    """The requests of a speculation round."""

    slots: Int32[jax.Array, "B"] = packed("num_slots")  # out of range for a padding row
    num_drafts: Int32[jax.Array, "B"] = packed(0)  # maximum number of accepted drafts, at most K
    extras: Int32[jax.Array, "B"] = packed(0)  # as in `PrefillInputs`
    page_tables: Int32[jax.Array, "B GP"] = packed(-1, "table_width")  # as in `PrefillInputs`
    # Drafts from the host; None if all drafts come from the drafter.
    suggestions: Suggestions | None = packed(lambda layout: Suggestions.padding(layout.path_width))


class StepModel(NamedTuple):
    """The static part of a step: a hashable value that is compiled into its programs."""

    target: Model
    drafter: Drafter
    verification: Verification
    kernels: str
    row_multiple: int  # the number of rows of a matmul is a multiple of this
    width_multiple: int  # the number of rows per request in a round is a multiple of this
    logprobs_mode: str  # which distribution to report: "raw", "processed" or "both"
    windows: tuple[int, ...] = ()  # sizes of the windows whose layers have separate pages
    max_deferred_rows: int = 0  # maximum number of rows kept for `observe_deferred`
    min_deferred_rounds: int = 0  # minimum number of kept rounds, even if they have more rows
    vocabulary: Vocabulary = WHOLE

    def width(self, k: int) -> int:
        """Return the number of rows per request, including padding, in a round of k drafts."""
        return -(-(k + 1) // self.width_multiple) * self.width_multiple

    def max_deferred(self, batch: int) -> int:
        """Return the maximum number of rounds without drafts that the drafter can observe together.

        Observing means that the drafter updates its cache with a round's hidden states. Each round
        has `batch` requests. The result is 0 if the drafter must observe each round at its end:
        because it cannot defer, or because fewer than two rounds can be kept.
        """
        count = max(self.max_deferred_rows // batch, self.min_deferred_rounds)
        while count * batch % self.row_multiple:
            count -= 1
        return count if self.drafter.may_defer and count > 1 else 0


def page_tables(inputs: PrefillInputs | DecodeInputs, model: StepModel) -> list[jax.Array]:
    """Return a list of page tables i32[B, P].

    The first page table is for layers that share one set of pages. Then, each window length in
    `model.windows` has a page table, because layers with this window have separate pages.
    """
    return jnp.split(inputs.page_tables, 1 + len(model.windows), axis=1)
