"""The engine's state on the device: one donated pytree of arrays.

A running request has a slot, which is its index in these arrays.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int32

from specjax.device.requests import Requests, init_requests


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """All state that steps read and write.

    A request owns one of the S slots from its admission until it finishes or is preempted. Only the
    device knows the values of the state: the host plans with upper bounds and learns results one
    step later.

    Between steps a request has `lengths` tokens in the caches. The token at position `lengths` is
    the request's last token: it was sampled, but the target has not run on it yet.
    """

    caches: tuple[Any, ...]  # the target's caches, one per cache kind
    snapshots: tuple[Any, ...]  # one per cache kind; None for a kind without snapshots
    drafter: Any  # the drafter's state
    deferred: Float[jax.Array, "R F"] | None  # features not yet observed, see `deferral`
    tokens: Int32[jax.Array, "S L"]  # prompt and output
    progress: Int32[jax.Array, "S 4"]  # holds the four properties below: one kernel writes all
    requests: Requests  # [S]

    @property
    def lengths(self) -> jax.Array:
        """The number of tokens in the caches, i32[S]."""
        return self.progress[:, 0]

    @property
    def pending(self) -> jax.Array:
        """The number of tokens that are in the caches but not yet in recurrent states, i32[S]."""
        return self.progress[:, 1]

    @property
    def is_active(self) -> jax.Array:
        """Whether a request has a last token and is not finished, bool[S]."""
        return self.progress[:, 2] > 0

    @property
    def observed(self) -> jax.Array:
        """The number of tokens that the drafter has observed (added to its cache), i32[S]."""
        return self.progress[:, 3]

    def with_progress(
        self,
        slots: jax.Array,
        lengths: jax.Array,
        pending: jax.Array,
        is_active: jax.Array,
        *,
        is_observed: bool,
    ) -> "EngineState":
        """Return the state with new `lengths`, `pending` and `is_active` for some requests.

        `slots` are the slots of these requests; out-of-range slots are ignored. The arrays are
        [B]. If `is_observed` is true, `observed` is also set to `lengths`.
        """
        new = [lengths, pending, is_active.astype(jnp.int32), lengths][: 3 + is_observed]
        written = self.progress.at[slots, : len(new)].set(jnp.stack(new, axis=1), mode="drop")
        return replace(self, progress=written)

    def all_observed(self, slots: jax.Array) -> "EngineState":
        """Record that the drafter's cache includes all tokens of the requests at `slots`.

        Return the new state.
        """
        lengths = self.lengths[slots]
        return replace(self, progress=self.progress.at[slots, 3].set(lengths, mode="drop"))

    def nothing_pending(self, slots: jax.Array) -> "EngineState":
        """Record that recurrent states include all tokens of the requests at `slots`.

        Return the new state. Call this after a prefill chunk, whose tokens cannot be rejected.
        """
        return replace(self, progress=self.progress.at[slots, 1].set(0, mode="drop"))


def init_state(
    num_slots: int,
    max_model_len: int,
    vocab_size: int,
    caches: tuple[Any, ...],
    snapshots: tuple[Any, ...],
    drafter: Any,
    deferred: jax.Array | None = None,
) -> EngineState:
    """Return the state of an engine without requests."""
    return EngineState(
        caches=caches,
        snapshots=snapshots,
        drafter=drafter,
        deferred=deferred,
        tokens=jnp.zeros((num_slots, max_model_len), jnp.int32),
        progress=jnp.zeros((num_slots, 4), jnp.int32),
        requests=init_requests(num_slots, vocab_size),
    )
