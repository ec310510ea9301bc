"""What each request asked for: arrays by slot, written once, when it is admitted."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specjax.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from logits. [S] by slot, or [B] for the rows of a step."""

    temperature: jax.Array  # f32[B]; 0 is greedy
    seeds: jax.Array  # u32[B]
    top_k: jax.Array  # i32[B]; 0 keeps all
    top_p: jax.Array  # f32[B]
    min_p: jax.Array  # f32[B]

    def repeat(self, count: int) -> "Sampling":
        """The parameters of each request, `count` times in a row."""
        return jax.tree.map(lambda x: jnp.repeat(x, count), self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Edits:
    """What changes logits before tokens are drawn from them. Ids of -1 are unused places."""

    repetition: jax.Array  # f32[B]; 1 is none
    presence: jax.Array  # f32[B]
    frequency: jax.Array  # f32[B]
    min_tokens: jax.Array  # i32[B]
    bias_ids: jax.Array  # i32[B, MAX_LOGIT_BIAS]
    bias: jax.Array  # f32[B, MAX_LOGIT_BIAS]
    bad_words: jax.Array  # i32[B, MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS], each word flush right
    allowed: jax.Array  # i32[B, ceil(V/32)], bit v % 32 of word v // 32 is token v
    processor: jax.Array  # i32[B], number of the request's row of logits processors; -1 is none


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Requests:
    """Everything that a request's admission fixes."""

    prompt_lengths: jax.Array  # i32[B]
    limits: jax.Array  # i32[B], most tokens a request may come to, prompt included
    stop_ids: jax.Array  # i32[B, MAX_STOP_IDS]
    sampling: Sampling
    edits: Edits

    def at(self, slots: jax.Array) -> "Requests":
        """The requests at `slots` i32[B]."""
        return jax.tree.map(lambda x: x[slots], self)

    def put(self, slots: jax.Array, new: "Requests") -> "Requests":
        """With `new` [B] at `slots`; slots past the last are dropped."""
        return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), self, new)


def init_requests(num_slots: int, vocab_size: int, *, xp: Any = jnp) -> Requests:
    """No requests: greedy, unedited. `xp` is `jax.numpy` or `numpy`."""

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
