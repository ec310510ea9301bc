"""Edits of logits before tokens are sampled, such as penalties and forbidden tokens.

Row t of a request's logits follows its committed tokens and its first t drafts. The row is edited
as if those drafts were committed, so verification sees the same logits as plain decoding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Int32

from specjax.device.requests import Requests
from specjax.device.vocabulary import WHOLE, Vocabulary
from specjax.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

# Pairs of a number and a tuple of logits processors, which run for the requests whose
# `Edits.processor` is the number.
Processors = tuple[tuple[int, tuple[Callable, ...]], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """The tokens of B requests, including the drafts of the step."""

    tokens: Int32[jax.Array, "B L"]  # lengths[b] committed tokens, then the drafts
    lengths: Int32[jax.Array, "B"]

    def then(self, drafts: jax.Array) -> "History":
        """Return the history with drafts i32[B, K] after the committed tokens."""
        batch, k = drafts.shape
        places = self.lengths[:, None] + jnp.arange(k)[None]
        row = jnp.arange(batch)[:, None]
        return History(self.tokens.at[row, places].set(drafts, mode="drop"), self.lengths)

    def extended(self, tokens: list[jax.Array]) -> "History":
        """Return the history after committing `tokens`, a list of i32[B], one per position."""
        if not tokens:
            return self
        longer = self.then(jnp.stack(tokens, axis=1))
        return History(longer.tokens, self.lengths + len(tokens))


def edit(
    logits: jax.Array,
    requests: Requests,
    history: History,
    masks: jax.Array | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> jax.Array:
    """Return the logits f32[B, T, V], edited as the requests' `SamplingParams` describe.

    Logits processors have already run (see `apply_processors`). Row t of request b follows
    `history.lengths[b]` + t tokens. `masks` i32[B, T, ceil(V/32)] holds a bit for each token, which
    is 1 if the request's grammar allows the token. `masks` is None if no request has a grammar.
    """
    batch, num_rows, num_columns = logits.shape
    edits, lengths = requests.edits, history.lengths[:, None] + jnp.arange(num_rows)[None]  # [B, T]
    has_penalty = (edits.repetition != 1) | (edits.presence != 0) | (edits.frequency != 0)
    logits = jax.lax.cond(
        has_penalty.any(),
        lambda x: _penalise(x, requests, history, lengths, vocabulary),
        lambda x: x,
        logits,
    )
    row, column = jnp.ogrid[:batch, :num_rows]
    row, column = row[..., None], column[..., None]

    ids = vocabulary.columns(edits.bias_ids, num_columns, edits.bias_ids >= 0)[:, None]
    logits = logits.at[row, column, ids].add(edits.bias[:, None], mode="drop")

    logits = jnp.where(vocabulary.bits(edits.allowed, num_columns)[:, None], logits, -jnp.inf)

    is_early = lengths - requests.prompt_lengths[:, None] < edits.min_tokens[:, None]
    stops = requests.stop_ids[:, None]
    stops = vocabulary.columns(stops, num_columns, is_early[..., None] & (stops >= 0))
    ends, is_match = _bad_words(edits.bad_words, history, lengths)
    ends = vocabulary.columns(ends[:, None], num_columns, is_match)
    forbidden = jnp.concatenate([stops, ends], axis=-1)
    logits = logits.at[row, column, forbidden].set(-jnp.inf, mode="drop")

    if masks is not None:
        logits = jnp.where(vocabulary.bits(masks, num_columns), logits, -jnp.inf)
    return logits


def apply_processors(
    logits: jax.Array,
    requests: Requests,
    history: History,
    processors: Processors,
    vocabulary: Vocabulary,
) -> jax.Array:
    """Return the logits f32[B, T, V], edited by each request's logits processors.

    Row t of request b follows `history.lengths[b]` + t tokens. The argument `logits` holds the
    model's logits, because all other edits come after these processors.
    """
    lengths = history.lengths[:, None] + jnp.arange(logits.shape[1])[None]  # [B, T]

    def apply(logits):
        for number, functions in processors:
            edited = logits
            for function in functions:
                of_rows = jax.vmap(jax.vmap(function, (None, 0, 0)))
                edited = of_rows(history.tokens, lengths, edited).astype(logits.dtype)
            logits = jnp.where((requests.edits.processor == number)[:, None, None], edited, logits)
        return logits

    return vocabulary.through_whole(apply, logits) if processors else logits


def _penalise(
    logits: jax.Array,
    requests: Requests,
    history: History,
    lengths: jax.Array,
    vocabulary: Vocabulary,
) -> jax.Array:
    batch, num_rows, num_columns = logits.shape
    edits = jax.tree.map(lambda x: x[:, None, None], requests.edits)
    place = jnp.arange(history.tokens.shape[1])[None]
    is_output = place >= requests.prompt_lengths[:, None]

    row = jnp.arange(batch)[:, None]
    is_known = ~is_output | (place < history.lengths[:, None])
    column = vocabulary.columns(history.tokens, num_columns, is_known)
    known = jnp.zeros((batch, 2, num_columns), jnp.int32)
    known = known.at[row, is_output.astype(jnp.int32), column].add(1, mode="drop")
    in_prompt, committed = known[:, :1], known[:, 1]

    # Draft j counts for the rows after it, unless it is a prompt token that is being scored.
    places = history.lengths[:, None] + jnp.arange(num_rows - 1)[None]
    drafts = jnp.take_along_axis(history.tokens, places, axis=1, mode="clip")
    counts = jnp.broadcast_to(committed[:, None], logits.shape)
    after = jnp.arange(num_rows)[:, None] > jnp.arange(num_rows - 1)[None]
    counted = after[None] & (places >= requests.prompt_lengths[:, None])[:, None]
    b, t, _ = jnp.ogrid[:batch, :num_rows, : num_rows - 1]
    column = vocabulary.columns(drafts[:, None], num_columns)
    counts = counts.at[b, t, column].add(counted.astype(jnp.int32), mode="drop")

    is_seen = (counts > 0) | (in_prompt > 0)
    scaled = jnp.where(logits > 0, logits / edits.repetition, logits * edits.repetition)
    logits = jnp.where(is_seen, scaled, logits)
    used, is_used = counts.astype(logits.dtype), (counts > 0).astype(logits.dtype)
    return logits - edits.frequency * used - edits.presence * is_used


def _bad_words(
    bad_words: jax.Array, history: History, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return each bad word's last token i32[B, W], and the rows where it would complete the word.

    The second result is bool[B, T, W]: whether the tokens before row t end with all but the last
    token of word w.
    """
    batch = bad_words.shape[0]
    words = bad_words.reshape(batch, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
    starts, ends = words[..., :-1], words[..., -1]
    before = jnp.arange(1 - MAX_BAD_WORD_TOKENS, 0)[None, None]
    places = lengths[..., None] + before  # [B, T, tokens - 1]
    tails = jnp.take_along_axis(
        history.tokens[:, None], jnp.maximum(places, 0), axis=2, mode="clip"
    )
    tails = jnp.where(places >= 0, tails, -2)[:, :, None]
    starts = starts[:, None]
    is_match = ((starts == tails) | (starts < 0)).all(axis=-1) & (ends[:, None] >= 0)
    return ends, is_match
