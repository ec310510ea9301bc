"""What a step is given: the inputs of its parts, and what is compiled into them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int32

from specjax.device.drafters.drafter import Drafter
from specjax.device.models.model import Model
from specjax.device.requests import Requests
from specjax.device.verification import Verification


class AdmitInputs(NamedTuple):
    """Requests to be admitted to slots."""

    slots: Int32[jax.Array, "B"]  # out of range for a padding row
    requests: Requests  # [B]
    tokens: Int32[jax.Array, "B L"]  # prompt and output so far, padded with -1


class SnapshotInputs(NamedTuple):
    """Slots whose recurrent states are copied to or from a snapshot."""

    slots: Int32[jax.Array, "B"]  # out of range for a padding row
    ids: Int32[jax.Array, "B"]  # of snapshots; out of range for a padding row
    ends: Int32[jax.Array, "B"]  # tokens that the states cover


class PrefillInputs(NamedTuple):
    """One chunk of each of B prompts."""

    slots: Int32[jax.Array, "B"]  # out of range for a padding row
    starts: Int32[jax.Array, "B"]  # tokens already in the caches
    counts: Int32[jax.Array, "B"]  # tokens in this chunk
    is_last: Int32[jax.Array, "B"]  # 1 if decoding comes next
    is_resumed: Int32[jax.Array, "B"]  # 1 if the token after the last chunk is known
    wants: Int32[jax.Array, "B"]  # `Wants` of any request; equal in all rows
    page_tables: Int32[jax.Array, "B GP"]  # of most layers, and after it of each of the windows


class DecodeInputs(NamedTuple):
    """The requests of a speculation round."""

    slots: Int32[jax.Array, "B"]  # out of range for a padding row
    num_drafts: Int32[jax.Array, "B"]  # how many of the K drafts may be accepted
    wants: Int32[jax.Array, "B"]  # as in `PrefillInputs`
    page_tables: Int32[jax.Array, "B GP"]  # of most layers, and after it of each of the windows


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
