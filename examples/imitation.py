"""Trains a model to imitate worked answers, so that GRPO begins with some right ones."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from arithmetic import MAX_TOKENS, Question
from grpo import Rows, begin, imitation_loss, make_optimizer, make_update

from specjax.device.models.model import Model
from specjax.text.tokenizer import ChatTokenizer


class Policy(NamedTuple):
    """A model with its parameters and tokenizer."""

    model: Model
    params: Any
    tokenizer: ChatTokenizer
    eos_id: int


@dataclass(frozen=True, kw_only=True)
class Imitation:
    """The settings of the imitation: number of steps, batch size, learning rate and so on."""

    steps: int = 100
    batch: int = 16
    rate: float = 1e-3
    slip_rate: float = 0.5  # fraction of answers with a wrong digit
    seed: int = 0


def imitate(policy: Policy, questions: Sequence[Question], settings: Imitation) -> Any:
    """Return the policy's parameters after imitating worked answers."""
    optimizer = make_optimizer(settings.rate)
    update = make_update(policy.model, optimizer, imitation_loss)
    learner, size = begin(policy.params, optimizer), settings.batch
    rng = random.Random(settings.seed)
    begun = time.perf_counter()
    for step in range(settings.steps):
        if time.perf_counter() - begun > 10:  # seconds between lines
            print(f"imitated {step} of {settings.steps} batches", flush=True)
            begun = time.perf_counter()
        chosen = [questions[(step * size + i) % len(questions)] for i in range(size)]
        learner, _ = update(learner, worked_rows(policy, chosen, settings.slip_rate, rng))
    return learner.params


def worked_rows(
    policy: Policy, questions: Sequence[Question], slip_rate: float, rng: random.Random
) -> Rows:
    """Return training rows of questions and worked answers.

    The fraction `slip_rate` of the answers has a wrong digit.
    """
    tokenizer = policy.tokenizer
    prompts = [tokenizer.encode(question.prompt) for question in questions]
    slips = [rng.choice((-1, 1)) if rng.random() < slip_rate else 0 for _ in questions]
    texts = [question.worked(slip) for question, slip in zip(questions, slips, strict=True)]
    encoded = tokenizer.tokenizer.encode_batch(texts, add_special_tokens=False)
    answers = [[*answer.ids, policy.eos_id] for answer in encoded]
    width = max(map(len, prompts)) + MAX_TOKENS
    tokens = np.zeros((len(questions), width), np.int32)
    mask = np.zeros((len(questions), width - 1), np.float32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens[row, : len(prompt) + len(answer)] = [*prompt, *answer]
        mask[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = 1
    return Rows(tokens, mask, np.zeros_like(mask), np.ones(len(questions), np.float32))
