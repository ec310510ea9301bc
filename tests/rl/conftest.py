"""Rollout engines on one tiny target and its head, whichever device they run on."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from support.engines import VOCAB, K
from support.rollouts import Build, copied, engine_builder
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
def build(target, speculation) -> Iterator[Build]:
    """Engines over the target, closed at the end of the module."""
    with engine_builder(target.folder, speculation) as make:
        yield make


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


@pytest.fixture
def hf(target) -> Any:
    """A copy of the transformers model, free to change."""
    return copy.deepcopy(target.hf)
