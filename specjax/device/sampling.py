"""Sampling of tokens from logits, shared by prefill, plain decoding, drafts and verification."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.draw_tokens import MIN_TEMPERATURE, draw_tokens
from specjax.device.edits import History, edit
from specjax.device.noise import Stream
from specjax.device.requests import Requests, Sampling
from specjax.device.vocabulary import WHOLE, Vocabulary


# Traced once for all drafts of a round, whose logits have equal shapes. Logits processors are not
# arguments: each program traces them again, because their attributes may have changed.
@partial(jax.jit, static_argnames=("vocabulary", "kernels"))
def process(
    logits: jax.Array,
    requests: Requests,
    history: History,
    masks: jax.Array | None = None,
    *,
    vocabulary: Vocabulary = WHOLE,
    kernels: str = "auto",
) -> jax.Array:
    """Return edited logits f32[B, T, V], truncated for requests with a temperature above 0.

    Row t of a request follows its committed tokens and its first t drafts (see `edits`). The result
    is not divided by the temperature, so without edits and truncation it equals the given logits.
    """
    edited = edit(logits, requests, history, masks, vocabulary)
    sampling = requests.sampling.repeat(logits.shape[1])
    draws = sampling.temperature > 0
    truncated = vocabulary.truncate(
        edited.reshape(-1, logits.shape[2]),
        _divisor(sampling),
        jnp.where(draws, sampling.top_k, 0),
        jnp.where(draws, sampling.top_p, 1.0),
        jnp.where(draws, sampling.min_p, 0.0),
        kernels,
    )
    return truncated.reshape(logits.shape)


def through_edits(
    use: Callable[[jax.Array], Any],
    logits: jax.Array,
    edit: Callable[[jax.Array], jax.Array] | None,
    has_edits: jax.Array | None,
) -> Any:
    """Return `use(edit(logits))` if `has_edits` bool[] is true, else `use(logits)`.

    `use` runs in both branches of a conditional, so that the conditional returns the result of
    `use`, which can be smaller than the logits. If `edit` is None, the result is `use(logits)`, and
    `has_edits` is not used.
    """
    if edit is None:
        return use(logits)
    return jax.lax.cond(has_edits, lambda: use(edit(logits)), lambda: use(logits))


def scale(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Return logits f32[N, V] divided by each row's temperature; greedy rows are unchanged."""
    return logits / _divisor(sampling)[:, None]


@partial(jax.jit, static_argnames=("vocabulary", "kernels"))  # traced once for both branches
def choose(
    logits: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
    *,
    vocabulary: Vocabulary = WHOLE,
    kernels: str = "auto",
) -> jax.Array:
    """Return a token i32[N] for each row of logits f32[N, V]: argmax(logits / T + noise).

    With Gumbel noise, this samples from softmax(logits / T) (Gumbel-max). The noise is a function
    of the request's seed and the token's position. `positions` i32[B] are the positions of each
    request's first row.

    Rows at temperature 0 take the plain argmax. Ties go to the lowest id. If no token is possible
    in a row (all its logits are -inf, or one is NaN), the result is -1.
    """
    return vocabulary.draw(logits, sampling, Stream.TARGET, (positions,), kernels)


@partial(jax.jit, static_argnames=("vocab_size", "stream", "wants_probs", "vocabulary", "kernels"))
def draw_draft(
    logits: jax.Array,
    token_ids: jax.Array | None,
    vocab_size: int,
    sampling: Sampling,
    stream: Stream,
    counters: tuple[jax.Array, ...],
    *,
    wants_probs: bool,
    vocabulary: Vocabulary = WHOLE,
    kernels: str = "auto",
) -> tuple[jax.Array, jax.Array | None]:
    """Return a draft token i32[B] for each row of logits f32[B, V_d], and its distribution.

    The token is sampled like the target's tokens. `stream` and `counters` select the noise (see
    `draw_tokens`). The result is 0 if no token is possible in a row. If the drafter has a reduced
    vocabulary, `token_ids` i32[V_d] holds the target's id of each draft token, and the noise
    depends on these ids; else `token_ids` is None.

    The distribution f32[B, vocab_size] is None if `wants_probs` is false. In a greedy batch it is
    zero, because verification does not use it.
    """
    if token_ids is None:
        token = vocabulary.draw(logits, sampling, stream, counters, kernels)
    else:
        token = draw_tokens(
            logits,
            sampling.temperature,
            sampling.seeds,
            stream,
            counters,
            token_ids=token_ids,
            vocab_size=vocab_size,
            kernels=kernels,
        )
    token = jnp.maximum(token, 0)
    if not wants_probs:
        return token, None

    def probs_of(logits):
        if token_ids is not None:
            logits = vocabulary.spread(logits, token_ids, vocab_size)
        probs = vocabulary.softmax(scale(logits, sampling))
        # The drafter may lack all tokens that a request allows. Such a draft is never accepted.
        is_empty = vocabulary.all(logits == -jnp.inf)[:, None]
        probs = jnp.where(is_empty, 0.0, probs)
        greedy = (sampling.temperature == 0)[:, None]
        return jnp.where(greedy, vocabulary.one_hot(token, logits.shape[1]), probs)

    def nothing(logits):
        return jnp.zeros_like(jax.eval_shape(probs_of, logits))

    return token, jax.lax.cond((sampling.temperature > 0).any(), probs_of, nothing, logits)


def _divisor(sampling: Sampling) -> jax.Array:
    # With lower temperatures, the quotients or their rounding errors would overflow.
    temperature = jnp.maximum(sampling.temperature, MIN_TEMPERATURE)
    return jnp.where(sampling.temperature == 0, 1.0, temperature)
