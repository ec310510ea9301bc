"""Turns the prompts that are shipped with the package into engine requests."""

import json
from collections.abc import Sequence
from pathlib import Path

from specjax.host.request import Request
from specjax.sampling_params import SamplingParams
from specjax.text.seeds import folded_seed
from specjax.text.tokenizer import ChatTokenizer

PROMPTS = Path(__file__).with_name("prompts.jsonl")


def read_questions() -> list[str]:
    """Return the questions shipped with the package; PROMPTS.md lists their sources."""
    return [json.loads(line)["question"] for line in PROMPTS.read_text("utf-8").splitlines()]


def tokenize(questions: Sequence[str], tokenizer: ChatTokenizer) -> list[tuple[int, ...]]:
    """Return each question's token ids, after applying the chat template if there is one."""
    if tokenizer.template is None:
        return [tuple(tokenizer.encode(question)) for question in questions]
    return [
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True
            )
        )
        for question in questions
    ]


def make_requests(
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    max_model_len: int,
    temperature: float,
    seed: int,
    stop_ids: Sequence[int],
) -> list[Request]:
    """Return one request per prompt.

    A request's seed depends only on `seed` and the prompt's index.
    """
    longest = max(map(len, prompts))
    if longest + max_tokens > max_model_len:
        raise ValueError(
            f"the longest prompt has {longest} tokens, and with max_tokens={max_tokens} exceeds "
            f"max_model_len={max_model_len}; raise --max-model-len or lower --max-tokens"
        )
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    first = folded_seed(seed)
    return [
        Request(i, tuple(prompt), params, max_tokens, ((first + i) % 2**32,), tuple(stop_ids))
        for i, prompt in enumerate(prompts)
    ]
