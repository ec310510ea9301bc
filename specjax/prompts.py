"""From what a user passes in to requests, with errors that name prompt, value and remedy."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.config import EngineConfig
from specjax.request import MAX_STOP_IDS, Request, SamplingParams
from specjax.tokenizer import ChatTokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(token, int | np.integer) for token in listed):
        return [listed]
    return listed


def make_request(
    prompt: Prompt,
    params: SamplingParams,
    *,
    request_id: int,
    where: str,
    config: EngineConfig,
    tokenizer: ChatTokenizer | None,
    vocab_size: int,
    eos_ids: tuple[int, ...],
) -> Request:
    """The request of one prompt; `where` is what errors call it.

    Raises:
        ValueError: a prompt or parameters that cannot be served.
    """
    token_ids = _token_ids(prompt, tokenizer, where)
    if not token_ids:
        raise ValueError(f"{where} is empty; a prompt needs at least one token")
    for name, ids in ("", token_ids), ("stop_token_ids: ", params.stop_token_ids):
        if bad := [token for token in ids if not 0 <= token < vocab_size]:
            raise ValueError(
                f"{where}: {name}token id {bad[0]} is outside the vocabulary of {vocab_size}"
            )
    room = config.max_model_len - len(token_ids)
    if room < 1:
        raise ValueError(
            f"{where} has {len(token_ids)} tokens and max_model_len={config.max_model_len} "
            "leaves no room for output; shorten the prompt or raise max_model_len"
        )
    seed = params.seed
    if seed is None:
        seed = int(np.random.SeedSequence([config.seed, request_id]).generate_state(1)[0])
    stop_ids = (*(() if params.ignore_eos else eos_ids), *params.stop_token_ids)
    stop_ids = tuple(dict.fromkeys(stop_ids))
    if len(stop_ids) > MAX_STOP_IDS:
        raise ValueError(
            f"{where}: stop_token_ids and the model's ends of sequence come to {len(stop_ids)} "
            f"ids; at most {MAX_STOP_IDS}"
        )
    return Request(
        request_id,
        tuple(token_ids),
        min(params.max_tokens or room, room),
        params.temperature,
        seed,
        stop_ids,
    )


def _token_ids(prompt: Prompt, tokenizer: ChatTokenizer | None, where: str) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                f"{where} is text, but the checkpoint has no tokenizer; pass token ids"
            )
        return tokenizer.encode(prompt)
    if isinstance(prompt, Mapping):
        if set(prompt) != {"prompt_token_ids"}:
            raise ValueError(f"{where}: expected the key prompt_token_ids, got {sorted(prompt)}")
        prompt = prompt["prompt_token_ids"]
    if not isinstance(prompt, Sequence | np.ndarray):
        raise ValueError(f"{where} is {prompt!r}; expected a text or a list of token ids")
    if not all(isinstance(token, int | np.integer) for token in prompt):
        raise ValueError(f"{where}: token ids must be integers")
    return [int(token) for token in prompt]
