"""Parameters of requests. They are written to arrays when a request is admitted.

A running request has a slot, which is its index in these arrays.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float32, Int32, UInt32

from specjax.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Sampling parameters in arrays: [S] for all slots, or [B] for the requests of a step."""

    temperature: Float32[jax.Array, "B"]  # 0 for greedy sampling
    seeds: UInt32[jax.Array, "B"]
    top_k: Int32[jax.Array, "B"]  # 0 keeps all tokens
    top_p: Float32[jax.Array, "B"]
    min_p: Float32[jax.Array, "B"]

    def repeat(self, count: int) -> "Sampling":
        """Return the parameters with `count` adjacent copies of each request's entry."""
        return jax.tree.map(lambda x: jnp.repeat(x, count), self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Edits:
    """Edits of logits before tokens are sampled. An id of -1 marks an unused entry."""

    repetition: Float32[jax.Array, "B"]  # 1 for no penalty
    presence: Float32[jax.Array, "B"]  # 0 for no penalty
    frequency: Float32[jax.Array, "B"]  # 0 for no penalty
    min_tokens: Int32[jax.Array, "B"]  # number of output tokens before stop ids are allowed
    bias_ids: Int32[jax.Array, "B biased"]
    bias: Float32[jax.Array, "B biased"]
    bad_words: Int32[jax.Array, "B bad_words"]  # each word is right-aligned
    allowed: Int32[jax.Array, "B mask_words"]  # token v is bit v % 32 of word v // 32
    processor: Int32[jax.Array, "B"]  # index of the request's logits processors; -1 for none


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Requests:
    """All parameters of requests, fixed at admission."""

    prompt_lengths: Int32[jax.Array, "B"]
    limits: Int32[jax.Array, "B"]  # maximum number of tokens, including the prompt
    stop_ids: Int32[jax.Array, "B stop_ids"]
    sampling: Sampling
    edits: Edits

    def at(self, slots: jax.Array) -> "Requests":
        """Return the parameters of the requests with slots `slots` i32[B]."""
        return _at(self, slots)

    def put(self, slots: jax.Array, new: "Requests") -> "Requests":
        """Write the parameters `new` of B requests at `slots` i32[B]; return all parameters.

        Out-of-range slots are ignored.
        """
        return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), self, new)


@jax.jit  # traced once for all branches of a step
def _at(requests: Requests, slots: jax.Array) -> Requests:
    return jax.tree.map(lambda x: x[slots], requests)


def init_requests(num_slots: int, vocab_size: int, *, xp: Any = jnp) -> Requests:
    """Return the parameters of empty slots: greedy sampling without edits.

    `xp` is `jax.numpy` or `numpy`, and determines the type of the arrays.
    """

    def full(value, dtype, width=None):
        return xp.full(num_slots if width is None else (num_slots, width), value, dtype)

    return Requests(
        prompt_lengths=full(0, xp.int32),
        limits=full(0, xp.int32),
        stop_ids=full(-1, xp.int32, MAX_STOP_IDS),
        sampling=Sampling(
            temperature=full(0, xp.float32),
            seeds=full(0, xp.uint32),
            top_k=full(0, xp.int32),
            top_p=full(1, xp.float32),
            min_p=full(0, xp.float32),
        ),
        edits=Edits(
            repetition=full(1, xp.float32),
            presence=full(0, xp.float32),
            frequency=full(0, xp.float32),
            min_tokens=full(0, xp.int32),
            bias_ids=full(-1, xp.int32, MAX_LOGIT_BIAS),
            bias=full(0, xp.float32, MAX_LOGIT_BIAS),
            bad_words=full(-1, xp.int32, MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS),
            allowed=full(-1, xp.int32, -(-vocab_size // 32)),
            processor=full(-1, xp.int32),
        ),
    )
