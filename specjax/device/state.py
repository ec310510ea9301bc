"""The engine's state on the device: one donated pytree, keyed by slot."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specjax.device.sampling import Sampling
from specjax.request import MAX_STOP_IDS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """Everything a step reads and writes. S slots; a request owns one from admission to finish.

    Only the device knows these values: the host plans with upper bounds and learns results one
    step later. Between steps a request has `lengths` tokens in the caches and `last_tokens` is
    the one after them, sampled but not yet run through the target.
    """

    kv: jax.Array  # [L, pages, page_size, 2, H_kv, D]
    drafter: Any  # the drafter's own state
    lengths: jax.Array  # i32[S]
    last_tokens: jax.Array  # i32[S]
    limits: jax.Array  # i32[S], most tokens a request may come to, prompt included
    stop_ids: jax.Array  # i32[S, MAX_STOP_IDS], -1 where unused
    is_active: jax.Array  # bool[S], has a last token and may go on
    sampling: Sampling  # [S]


def init_state(num_slots: int, kv: jax.Array, drafter: Any) -> EngineState:
    """The state of an engine without requests."""

    def zeros(dtype):
        return jnp.zeros(num_slots, dtype)

    return EngineState(
        kv=kv,
        drafter=drafter,
        lengths=zeros(jnp.int32),
        last_tokens=zeros(jnp.int32),
        limits=zeros(jnp.int32),
        stop_ids=jnp.full((num_slots, MAX_STOP_IDS), -1, jnp.int32),
        is_active=zeros(bool),
        sampling=Sampling(zeros(jnp.float32), zeros(jnp.uint32)),
    )
