"""Distillers for tests, which share a compiled training step, and changes of weights.

A training step is compiled for a model, a head, an optimiser and the shape of a batch. Normally,
each distiller compiles its step. Here, distillers with equal settings share one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import keystr, tree_leaves_with_path
from support.rollouts import copied

from specjax import SamplingParams
from specjax.rl import OnlineDistiller, RolloutEngine
from specjax.rl.rollouts import Score
from specjax.train.loop import make_train_step
from specjax.train.optimizer import steady_adamw

SAMPLED = SamplingParams(temperature=1.0, max_tokens=12)
RATE, LENGTH, NUM_UNROLLED = 3e-3, 24, 2
LENGTHS = (7, 5, 9, 6, 11, 8)  # of prompts: a batch


@contextmanager
def shared_steps() -> Iterator[None]:
    """Let distillers with equal settings share a compiled step, inside the `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specjax.rl.distill.steady_adamw", cache(steady_adamw))
        patch.setattr("specjax.rl.distill.make_train_step", _shared_step)
        yield


def _shared_step(loss: Any, optimizer: Any, seed: int) -> Any:
    return _step_of(loss.func, loss.args, tuple(loss.keywords.items()), optimizer, seed)


@cache
def _step_of(function: Any, args: tuple, keywords: tuple, optimizer: Any, seed: int) -> Any:
    return make_train_step(partial(function, *args, **dict(keywords)), optimizer, seed)


def distiller(engine: RolloutEngine, **settings: Any) -> OnlineDistiller:
    """Return a distiller with the batch size and lengths of all tests."""
    shape = {"batch_size": len(LENGTHS), "length": LENGTH, "num_unrolled": NUM_UNROLLED}
    return OnlineDistiller(engine, **shape | {"learning_rate": RATE} | settings)


def moved(params: Any, scale: float = 0.05) -> Any:
    """Return weights with random changes, as after a training step."""
    rng = np.random.default_rng(7)

    def move(x: np.ndarray) -> jax.Array:
        if x.dtype == np.float32:
            x = x + (scale * x.std() * rng.normal(size=x.shape)).astype(np.float32)
        return jnp.array(x)

    return jax.tree.map(move, copied(params))


def give_drafter(engine: RolloutEngine) -> None:
    """Call `update_drafter` with changed weights, including the embedding."""
    engine.update_drafter(moved(engine.params.drafter))


def made_up_scores(engine: RolloutEngine) -> Any:
    """Return a replacement for an engine's `score`.

    Its features depend on the target's embedding and the tokens, and need no forward pass.
    """

    def score(samples: Any, *, features: bool) -> list[Score]:
        assert features
        embedding = np.asarray(engine.params.target.embedding.values)
        num_aux = len(engine.drafter.aux_layers)
        found = []
        for prompt, output in samples:
            rows = embedding[[*prompt, *output][:-1]]
            hidden = np.tanh(np.cumsum(rows, axis=0))
            auxiliary = np.tile(rows, num_aux) if num_aux else None
            found.append(Score(np.zeros(len(output), np.float32), None, hidden, auxiliary))
        return found

    return score


def assert_equal(one: Any, other: Any) -> None:
    """Check that two trees have the same arrays, bit for bit."""
    for (path, a), (_, b) in zip(
        tree_leaves_with_path(one), tree_leaves_with_path(other), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=keystr(path))
