"""Refuses parameters that together leave no token to choose, if that is known in advance."""

import numpy as np

from specjax.host.grammar import Grammar
from specjax.sampling_params import SamplingParams


def check_some_allowed(
    params: SamplingParams,
    vocab_size: int,
    stop_ids: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
    grammar: Grammar | None,
) -> None:
    """Refuse parameters that allow no first token.

    Also refuse a `choice` whose texts are all shorter than `min_tokens`. Later tokens cannot be
    checked in advance: if no token is allowed at a later position, the output ends there with an
    error.

    Raises:
        ValueError: no token is left; the message names the parameters.
    """
    forbidden = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        forbidden |= set(stop_ids)
    forbidden = {token for token in forbidden if 0 <= token < vocab_size}
    allowed = params.allowed_token_ids
    if allowed is not None and forbidden.issuperset(allowed):
        raise ValueError(
            "allowed_token_ids are all forbidden, as bad_words or as ends of sequence before "
            f"min_tokens={params.min_tokens}; allow others too"
        )
    if allowed is None and len(forbidden) >= vocab_size:
        raise ValueError(
            f"bad_words, and ends of sequence before min_tokens={params.min_tokens}, forbid all "
            f"{vocab_size} tokens of the vocabulary; leave some out"
        )
    if grammar is not None:
        _check_grammar(params, grammar, forbidden)


def _check_grammar(params: SamplingParams, grammar: Grammar, forbidden: set[int]) -> None:
    choice = getattr(params.structured_outputs, "choice", None)
    longest = max((len(text.encode()) for text in choice or ()), default=0)
    if choice and params.min_tokens > longest:
        raise ValueError(
            f"structured_outputs.choice: no text has more than {longest} tokens, and "
            f"min_tokens={params.min_tokens} allows no earlier end; lower min_tokens"
        )
    if params.allowed_token_ids is None and not forbidden:
        return
    is_left = np.unpackbits(grammar.first.view(np.uint8), bitorder="little")
    is_left[sorted(forbidden)] = 0
    candidates = (
        is_left if params.allowed_token_ids is None else is_left[[*params.allowed_token_ids]]
    )
    if not candidates.any():
        raise ValueError(
            "structured_outputs allows no first token that allowed_token_ids, bad_words and "
            f"min_tokens={params.min_tokens} leave; relax one of them"
        )
