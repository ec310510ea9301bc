"""The engine's state on the device: one donated pytree, keyed by slot."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specjax.device.requests import Requests, init_requests


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """Everything a step reads and writes. S slots; a request owns one from admission to finish.

    Only the device knows these values: the host plans with upper bounds and learns results one
    step later. Between steps a request has `lengths` tokens in the caches, and the token at that
    position is its last: chosen, but not yet run through the target.
    """

    cache: Any  # the target's, see `Model.init_cache`
    snapshots: Any  # `recurrent.Snapshots` of prompts; None without recurrent states
    drafter: Any  # the drafter's own state
    tokens: jax.Array  # i32[S, max_model_len], prompt and output
    lengths: jax.Array  # i32[S]
    pending: jax.Array  # i32[S], of those tokens, the last that recurrent states lack
    is_active: jax.Array  # bool[S], has a last token and may go on
    requests: Requests  # [S]


def init_state(
    num_slots: int,
    max_model_len: int,
    vocab_size: int,
    cache: Any,
    drafter: Any,
    snapshots: Any = None,
) -> EngineState:
    """The state of an engine without requests."""
    return EngineState(
        cache=cache,
        snapshots=snapshots,
        drafter=drafter,
        tokens=jnp.zeros((num_slots, max_model_len), jnp.int32),
        lengths=jnp.zeros(num_slots, jnp.int32),
        pending=jnp.zeros(num_slots, jnp.int32),
        is_active=jnp.zeros(num_slots, bool),
        requests=init_requests(num_slots, vocab_size),
    )
