"""Rollout engines with a tiny target and head, on a real or simulated device."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import VOCAB, K
from support.refits import LENGTHS, shared_steps
from support.rollouts import SETTINGS, copied
from support.weights import HeadFiles, TargetFiles

from specjax.rl import RolloutEngine


@pytest.fixture(scope="session")
def target(checkpoints) -> TargetFiles:
    return checkpoints.target("llama", vocab_size=VOCAB)


@pytest.fixture(scope="session")
def module(checkpoints) -> HeadFiles:
    """A hybrid target with its own MTP module."""
    return checkpoints.mtp(checkpoints.target("qwen3_5", vocab_size=VOCAB))


@pytest.fixture(scope="session")
def speculation(checkpoints, target) -> dict[str, Any]:
    head = checkpoints.eagle3(target, draft_vocab=20)
    return {"method": "eagle3", "model": str(head.folder), "num_speculative_tokens": K}


@pytest.fixture(scope="module")
def build(target, speculation) -> Iterator[Callable[..., RolloutEngine]]:
    """Return a function that makes engines, which are closed at the end of the module.

    Only engines with drafts report raw log-probabilities: both variants of both kinds of engines
    would compile everything twice.
    """
    engines: list[RolloutEngine] = []

    def make(folder: Path = target.folder, *, drafts: Any = True) -> RolloutEngine:
        config = speculation if drafts is True else drafts or None
        options = {**SETTINGS, "raw_logprobs": drafts is True, "speculative_config": config}
        engines.append(RolloutEngine(folder, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def shared_engine(build) -> RolloutEngine:
    return build()


@pytest.fixture(scope="module")
def original(shared_engine) -> Any:
    """The target's own weights."""
    return copied(shared_engine.params.target)


@pytest.fixture
def engine(shared_engine, original) -> Iterator[RolloutEngine]:
    """An engine with the target's own weights."""
    shared_engine.update_weights(original)
    yield shared_engine
    shared_engine.wake_up()
    shared_engine.resume()


@pytest.fixture(scope="module")
def one_step() -> Iterator[None]:
    """Let distillers with equal settings share a compiled step."""
    with shared_steps():
        yield


@pytest.fixture
def prompts(ragged_prompts) -> list[list[int]]:
    """As many prompts as a distiller's batch has rows."""
    return ragged_prompts(*LENGTHS, vocab_size=VOCAB)


@pytest.fixture
def hf(target) -> Any:
    """A copy of the transformers model, free to change."""
    return copy.deepcopy(target.hf)
