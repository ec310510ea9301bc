"""The engine's state on the device: one donated pytree, indexed by slot."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int32

from specjax.device.requests import Requests, init_requests


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """All state that steps read and write. A request owns one of S slots from admission to finish.

    Only the device knows these values: the host plans with upper bounds and learns results one step
    later. Between steps a request has `lengths` tokens in the caches. The token at position
    `lengths` is its last: it was sampled, but the target has not run it yet.
    """

    caches: tuple[Any, ...]  # of the target, one per cache kind
    snapshots: tuple[Any, ...]  # per cache kind; None for a kind without snapshots
    drafter: Any  # the drafter's state
    deferred: Float[jax.Array, "R F"] | None  # features not yet observed, see `deferral`
    tokens: Int32[jax.Array, "S L"]  # prompt and output
    progress: Int32[jax.Array, "S 4"]  # the properties below; written by one kernel
    requests: Requests  # [S]

    @property
    def lengths(self) -> jax.Array:
        """Number of tokens in the caches, i32[S]."""
        return self.progress[:, 0]

    @property
    def pending(self) -> jax.Array:
        """Number of these tokens, the last ones, that recurrent states lack, i32[S]."""
        return self.progress[:, 1]

    @property
    def is_active(self) -> jax.Array:
        """Whether a request has a last token and is not finished, bool[S]."""
        return self.progress[:, 2] > 0

    @property
    def observed(self) -> jax.Array:
        """Number of tokens that the drafter has observed, i32[S]."""
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
        """Return the state with these values [B] set at `slots`; out-of-range slots are dropped.

        `is_observed` sets `observed` to `lengths` as well.
        """
        new = [lengths, pending, is_active.astype(jnp.int32), lengths][: 3 + is_observed]
        written = self.progress.at[slots, : len(new)].set(jnp.stack(new, axis=1), mode="drop")
        return replace(self, progress=written)

    def all_observed(self, slots: jax.Array) -> "EngineState":
        """Return the state with all tokens of `slots` marked as observed."""
        lengths = self.lengths[slots]
        return replace(self, progress=self.progress.at[slots, 3].set(lengths, mode="drop"))

    def nothing_pending(self, slots: jax.Array) -> "EngineState":
        """Return the state with no pending tokens at `slots`: after a chunk, recurrent states
        include all its tokens, as prompt tokens cannot be rejected."""
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
