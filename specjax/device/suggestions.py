"""Replaces the drafter's drafts by drafts from the host, if these fit the accepted tokens.

The host plans a round while another round is in flight, so it does not know the last tokens yet. It
sends a path: the tokens that it expects, from the first position that it does not know. The device
knows all tokens. It compares them with the start of the path. If they are equal, the rest of the
path becomes the drafts.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from specjax.device.edits import History
from specjax.device.verification import Draft
from specjax.device.vocabulary import Vocabulary


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Suggestions:
    """For each of B requests, a path: the tokens that the host expects from a position on."""

    starts: Int32[jax.Array, "B"]  # position of the path's first token
    tokens: Int32[jax.Array, "B W"]  # padded with -1

    @classmethod
    def padding(cls, width: int) -> "Suggestions | None":
        """Return an empty path for one padding row, as NumPy arrays; None if `width` is 0."""
        if not width:
            return None
        empty: Any = np.zeros(1, np.int32), np.full((1, width), -1, np.int32)
        return cls(*empty)


def replace_drafts(
    draft: Draft, suggestions: Suggestions, history: History, vocabulary: Vocabulary
) -> Draft:
    """Return `draft`, with the drafts of some requests replaced by tokens in `suggestions`.

    `suggestions` has a path for each request: tokens that are expected from some position on. If
    the request's tokens from this position on equal the first tokens of the path, the next tokens
    of the path become the drafts, with one-hot distributions. If they differ, or if the path has no
    next token, the request keeps the drafts in `draft`.
    """
    k, width = draft.tokens.shape[1], suggestions.tokens.shape[1]
    if not k:
        return draft
    column = jnp.arange(width, dtype=jnp.int32)[None]
    places = suggestions.starts[:, None] + column
    known = jnp.take_along_axis(history.tokens, places, axis=1, mode="clip")
    is_past = places < history.lengths[:, None]
    agrees = jnp.all(~is_past | (known == suggestions.tokens), axis=1)
    num_past = history.lengths - suggestions.starts
    next_places = num_past[:, None] + jnp.arange(k, dtype=jnp.int32)[None]
    is_inside = (next_places >= 0) & (next_places < width)
    tokens = jnp.take_along_axis(suggestions.tokens, next_places, axis=1, mode="clip")
    counts = jnp.where(is_inside & (tokens >= 0), 1, 0).sum(axis=1, dtype=jnp.int32)
    is_used = agrees & (counts > 0)
    tokens = jnp.maximum(jnp.where(is_used[:, None], tokens, draft.tokens), 0)
    probs = draft.probs
    if probs is not None:
        certain = vocabulary.one_hot(tokens, probs.shape[-1]).astype(probs.dtype)
        probs = jnp.where(is_used[:, None, None], certain, probs)
    others = jnp.full_like(counts, k) if draft.counts is None else draft.counts
    return Draft(tokens, probs, jnp.where(is_used, counts, others))
