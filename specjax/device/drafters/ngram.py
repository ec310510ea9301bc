"""Prompt lookup: the drafts are the tokens that followed an earlier occurrence of the last tokens.

Prompt lookup needs no weights or state, only a request's tokens (Saxena 2023, prompt lookup
decoding; vLLM's n-gram drafts). This drafter differs from vLLM's in two ways. Among several
occurrences, it uses the latest, because recent text predicts better; vLLM uses the earliest. If the
history ends before K drafts are found, it repeats the tokens after the match, so that a match
always gives K drafts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.config import SpeculativeConfig
from specjax.device.drafters.drafter import DraftContext, Params, Stateless
from specjax.device.edits import History
from specjax.device.models.model import Model
from specjax.device.verification import Draft


@dataclass(frozen=True)
class NGramDrafter(Stateless):
    """A drafter that searches for an earlier occurrence of the last tokens.

    It uses the longest match of `prompt_lookup_min` to `prompt_lookup_max` tokens.
    """

    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5

    def draft(
        self, target: Model, params: Params, state: None, context: DraftContext, k: int
    ) -> tuple[Draft, None]:
        """Return k drafts for each active request whose last tokens also occur earlier.

        Other requests get zeros, and their number of drafts is 0. The drafts do not depend on logit
        edits such as penalties; verification applies these edits.
        """
        history = context.history
        sizes, ends = longest_matches(history, self.prompt_lookup_max)
        is_found = context.is_active & (sizes >= self.prompt_lookup_min)
        # Repeat the tokens between the match and the end of the history.
        periods = jnp.maximum(history.lengths - 1 - ends, 1)[:, None]
        places = ends[:, None] + 1 + jnp.arange(k, dtype=jnp.int32)[None] % periods
        tokens = jnp.take_along_axis(history.tokens, places, axis=1, mode="clip")
        tokens = jnp.where(is_found[:, None], tokens, 0)
        return Draft(tokens, None, k * is_found.astype(jnp.int32)), None


def load(
    folder: Path | None,
    config: SpeculativeConfig,
    target: Model,
    dtype: Any,
    placement: Any,
    log: Any,
) -> tuple[NGramDrafter, None]:
    """Return the drafter that `config` describes. It has no checkpoint and no parameters.

    The method "suffix" also uses this drafter, for requests to which the host suggests no drafts.
    """
    min_size, max_size = config.prompt_lookup_min, config.prompt_lookup_max
    if min_size is None or max_size is None:  # only the method "ngram" has them
        return NGramDrafter(), None
    return NGramDrafter(min_size, max_size), None


def longest_matches(history: History, max_size: int) -> tuple[jax.Array, jax.Array]:
    """Return the sizes and the end indices, i32[B] each, of the longest matches.

    A match is an earlier occurrence of a request's last tokens. It ends before the request's last
    token. The size of a match is its number of tokens, at most `max_size`. Among equally long
    matches, the latest is returned. The end of a match of size 0 is undefined.

    The function takes O(B L max_size) time and uses arrays [B, L].
    """
    tokens, lengths = history.tokens, history.lengths[:, None]
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    # The last token, the token before it, ...; indices before the first token never match.
    suffix_places = lengths - 1 - jnp.arange(max_size, dtype=jnp.int32)[None]
    suffix = jnp.take_along_axis(tokens, suffix_places, axis=1, mode="clip")
    is_match = place < lengths - 1  # [B, L], whether the last i tokens end at this index
    sizes = jnp.zeros(tokens.shape, jnp.int32)
    for i in range(max_size):
        is_same = tokens == suffix[:, i : i + 1]
        is_match &= jnp.pad(is_same, ((0, 0), (i, 0)))[:, : tokens.shape[1]]
        sizes += is_match.astype(jnp.int32)
    longest = sizes.max(axis=1)
    ends = jnp.where(sizes == longest[:, None], place, -1).max(axis=1)
    return longest, ends
