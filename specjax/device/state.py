"""The engine's state on the device: one donated pytree, keyed by slot."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int32

from specjax.device.requests import Requests, init_requests


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """Everything a step reads and writes. S slots; a request owns one from admission to finish.

    Only the device knows these values: the host plans with upper bounds and learns results one
    step later. Between steps a request has `lengths` tokens in the caches, and the token at that
    position is its last: chosen, but not yet run through the target.
    """

    caches: tuple[Any, ...]  # the target's, one of each of its kinds
    snapshots: tuple[Any, ...]  # of prompts' ends, by kind of cache; None of those without
    drafter: Any  # the drafter's own state
    tokens: Int32[jax.Array, "S L"]  # prompt and output
    progress: Int32[jax.Array, "S 3"]  # the three below; one array, so that one kernel writes them
    requests: Requests  # [S]

    @property
    def lengths(self) -> jax.Array:
        """Tokens in the caches, i32[S]."""
        return self.progress[:, 0]

    @property
    def pending(self) -> jax.Array:
        """Of those tokens, the last that recurrent states lack, i32[S]."""
        return self.progress[:, 1]

    @property
    def is_active(self) -> jax.Array:
        """Has a last token and may go on, bool[S]."""
        return self.progress[:, 2] > 0

    def with_progress(
        self, slots: jax.Array, lengths: jax.Array, pending: jax.Array, is_active: jax.Array
    ) -> "EngineState":
        """With those of `slots` i32[B] set, all [B]; slots past the last are dropped."""
        new = jnp.stack([lengths, pending, is_active.astype(jnp.int32)], axis=1)
        return replace(self, progress=self.progress.at[slots].set(new, mode="drop"))


def init_state(
    num_slots: int,
    max_model_len: int,
    vocab_size: int,
    caches: tuple[Any, ...],
    snapshots: tuple[Any, ...],
    drafter: Any,
) -> EngineState:
    """The state of an engine without requests."""
    return EngineState(
        caches=caches,
        snapshots=snapshots,
        drafter=drafter,
        tokens=jnp.zeros((num_slots, max_model_len), jnp.int32),
        progress=jnp.zeros((num_slots, 3), jnp.int32),
        requests=init_requests(num_slots, vocab_size),
    )
