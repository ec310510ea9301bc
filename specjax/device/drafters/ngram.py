"""Prompt lookup: drafts are what followed the last tokens when they occurred before.

Needs no weights and keeps no state; it looks only at the tokens of a request (Saxena 2023, prompt
lookup decoding; vLLM's n-gram drafts). Two choices are our own. Of several occurrences the latest
counts, where vLLM takes the earliest: recent text predicts better. And where the history ends
before K drafts are found, its repetition goes on, as if the drafts were history, too: a match
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
    """Drafts from the longest match of `prompt_lookup_min` to `prompt_lookup_max` tokens."""

    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5

    def draft(
        self, target: Model, params: Params, state: None, context: DraftContext, k: int
    ) -> tuple[Draft, None]:
        """k tokens for a request that is active and has a match, or a count of 0 and zeros.

        They are certain, whatever the request asks of its logits: edits come with verification.
        """
        history = context.history
        sizes, ends = longest_matches(history, self.prompt_lookup_max)
        is_found = context.is_active & (sizes >= self.prompt_lookup_min)
        # The tokens between the match and the end of the history, over and over.
        periods = jnp.maximum(history.lengths - 1 - ends, 1)[:, None]
        places = ends[:, None] + 1 + jnp.arange(k, dtype=jnp.int32) % periods
        tokens = jnp.take_along_axis(history.tokens, places, axis=1, mode="clip")
        tokens = jnp.where(is_found[:, None], tokens, 0)
        return Draft(tokens, None, k * is_found.astype(jnp.int32)), None


def load(
    folder: Path | None, config: SpeculativeConfig, target: Model, dtype: Any, placement: Any
) -> tuple[NGramDrafter, None]:
    """The drafter that a config describes; there is no checkpoint."""
    min_size, max_size = config.prompt_lookup_min, config.prompt_lookup_max
    assert min_size is not None and max_size is not None, "the config has them for this method"
    return NGramDrafter(min_size, max_size), None


def longest_matches(history: History, max_size: int) -> tuple[jax.Array, jax.Array]:
    """How many of each request's last tokens occurred before, and up to which place, both i32[B].

    The longest match, of `max_size` tokens at most, where it last ended before the last token. The
    place of a match of size 0 means nothing. Work is O(B L max_size), in values of [B, L].
    """
    tokens, lengths = history.tokens, history.lengths[:, None]
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    # The last token, the one before it, ...; places before a history's first token never match.
    suffix_places = lengths - 1 - jnp.arange(max_size, dtype=jnp.int32)
    suffix = jnp.take_along_axis(tokens, suffix_places, axis=1, mode="clip")
    is_match = place < lengths - 1  # [B, L], that the last i tokens occur up to this place
    sizes = jnp.zeros(tokens.shape, jnp.int32)
    for i in range(max_size):
        is_same = tokens == suffix[:, i : i + 1]
        is_match &= jnp.pad(is_same, ((0, 0), (i, 0)))[:, : tokens.shape[1]]
        sizes += is_match.astype(jnp.int32)
    longest = sizes.max(axis=1)
    ends = jnp.where(sizes == longest[:, None], place, -1).max(axis=1)
    return longest, ends
