"""What a step is given: the inputs of its parts, and what is compiled into them."""

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
from specjax.device.verification import Verification
from specjax.device.vocabulary import WHOLE, Vocabulary


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdmitInputs:
    """Requests to be admitted to slots."""

    slots: Int32[jax.Array, "B"] = packed("num_slots")  # out of range for a padding row
    requests: Requests = packed(lambda layout: init_requests(1, layout.vocab_size, xp=np))  # [B]
    # Prompt and output so far, padded with -1.
    tokens: Int32[jax.Array, "B L"] = packed(-1, "max_model_len")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SnapshotInputs:
    """Slots whose recurrent states are copied to or from a snapshot."""

    slots: Int32[jax.Array, "B"] = packed("num_slots")  # out of range for a padding row
    ids: Int32[jax.Array, "B"] = packed("num_snapshots")  # out of range for a padding row
    ends: Int32[jax.Array, "B"] = packed(0)  # tokens that the states cover


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillInputs:
    """One chunk of each of B prompts."""

    slots: Int32[jax.Array, "B"] = packed("num_slots")  # out of range for a padding row
    starts: Int32[jax.Array, "B"] = packed(0)  # tokens already in the caches
    counts: Int32[jax.Array, "B"] = packed(0)  # tokens in this chunk
    is_last: Int32[jax.Array, "B"] = packed(0)  # 1 if decoding comes next
    is_resumed: Int32[jax.Array, "B"] = packed(0)  # 1 if the token after the last chunk is known
    extras: Int32[jax.Array, "B"] = packed(0)  # `Extras` of any request; equal in all rows
    # Of most layers, and after it of each of the windows.
    page_tables: Int32[jax.Array, "B GP"] = packed(-1, "table_width")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeInputs:
    """The requests of a speculation round."""

    slots: Int32[jax.Array, "B"] = packed("num_slots")  # out of range for a padding row
    num_drafts: Int32[jax.Array, "B"] = packed(0)  # how many of the K drafts may be accepted
    extras: Int32[jax.Array, "B"] = packed(0)  # as in `PrefillInputs`
    page_tables: Int32[jax.Array, "B GP"] = packed(-1, "table_width")  # as in `PrefillInputs`


class StepModel(NamedTuple):
    """The static part of a step, which is compiled in. Hashable."""

    target: Model
    drafter: Drafter
    verification: Verification
    kernels: str
    row_multiple: int  # the rows of a matmul are a multiple of this
    width_multiple: int  # the rows per request of a round, too
    logprobs_mode: str  # which distribution to report: "raw", "processed" or "both"
    windows: tuple[int, ...] = ()  # whose layers have pages of their own
    max_deferred_rows: int = 0  # that the drafter observes later, of all requests of a round
    vocabulary: Vocabulary = WHOLE

    def width(self, k: int) -> int:
        """Return the rows per request of a round of k drafts."""
        return -(-(k + 1) // self.width_multiple) * self.width_multiple

    def max_deferred(self, batch: int) -> int:
        """Return how many rounds without drafts of `batch` requests the drafter observes together;
        0 if it observes each at once."""
        count = self.max_deferred_rows // batch
        while count * batch % self.row_multiple:
            count -= 1
        return count if self.drafter.may_defer and count > 1 else 0


def page_tables(inputs: PrefillInputs | DecodeInputs, model: StepModel) -> list[jax.Array]:
    """Return the page table i32[B, P] of most layers, and that of each window."""
    return jnp.split(inputs.page_tables, 1 + len(model.windows), axis=1)
