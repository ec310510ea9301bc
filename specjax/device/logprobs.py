"""Log-probabilities of tokens, for requests that ask for them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.device.vocabulary import WHOLE, Vocabulary


class Logprobs(NamedTuple):
    """Log-probabilities of one token per row, and of the most likely tokens."""

    logprobs: jax.Array  # f32[N]
    ranks: jax.Array  # i32[N], 1 for the most likely token
    top_ids: jax.Array  # i32[N, n], most likely first
    top_logprobs: jax.Array  # f32[N, n]
    raw: jax.Array | None = None  # f32[N], from the raw logits; None if not wanted in addition


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, num_top: int, vocabulary: Vocabulary = WHOLE
) -> Logprobs:
    """Return the log-probabilities of tokens i32[N], and of each row's `num_top` likeliest tokens.

    The log-probabilities are the log-softmax of logits f32[N, V].
    """
    all_logprobs = vocabulary.log_softmax(logits)
    logprobs = vocabulary.at(all_logprobs, tokens[:, None])
    ranks = 1 + vocabulary.sum(all_logprobs > logprobs, jnp.int32)
    top_logprobs, top_ids = vocabulary.top_k(all_logprobs, num_top)
    return Logprobs(logprobs[:, 0], ranks, top_ids, top_logprobs)


def logprobs_of(logits: jax.Array, tokens: jax.Array, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Return the log-softmax f32[N] of logits f32[N, V] at tokens i32[N]."""
    return vocabulary.at(logits, tokens[:, None])[:, 0] - vocabulary.logsumexp(logits)


def pack_logprobs(found: Logprobs, batch: int) -> jax.Array:
    """Return log-probabilities as one array i32[B, ...] for B = `batch` requests.

    The array has the fields of `found`, one after the other, with the bits of f32 numbers as i32.
    `found` has N rows, which are N / B consecutive rows for each request.
    """

    def as_ints(x):
        return x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32)

    fields = [as_ints(x).reshape(batch, -1) for x in found if x is not None]
    return jnp.concatenate(fields, axis=1)
