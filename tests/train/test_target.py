"""The target's loss, compared with its definition; and a model whose loss falls."""

from argparse import ArgumentParser
from dataclasses import replace

import jax
import numpy as np
import pytest
from support.params import random_params

from specjax.commands.train import add_arguments
from specjax.device.models.qwen3_5 import ATTENTION, DELTA, Qwen35
from specjax.train.context import CausalRows
from specjax.train.data import Document
from specjax.train.loop import Schedule
from specjax.train.target import DEMOS, evaluate, init_params, next_token_loss, train_target

NIGHTLY = "glm4_moe_lite"


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.nightly] * (name == NIGHTLY)) for name in DEMOS],
)
def model(request):
    small = DEMOS[request.param].make(16, 2, 64)
    return replace(small, layer_types=(DELTA, ATTENTION)) if isinstance(small, Qwen35) else small


@pytest.mark.parametrize("name", DEMOS)
def test_the_command_takes_every_architecture(name):
    add_arguments(parser := ArgumentParser())
    argv = ["target", "--architecture", name, "--data", "x", "--out", "y"]
    assert parser.parse_args(argv).architecture == name


@pytest.mark.slow
def test_loss_is_the_mean_negative_log_probability(model):
    params = jax.device_put(random_params(model.specs(), 0))
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 16, (2, 4)).astype(np.int32)

    @jax.jit
    def run(params, rows):
        fed = rows[:, :-1].reshape(-1)
        features, _ = model.extend(params, fed, CausalRows.of(*rows[:, :-1].shape), None)
        return next_token_loss(model, params, rows), model.logits(params, features.hidden)

    # What follows is other tokens: the loss may not see them.
    losses = []
    for t in range(3):
        others = rng.integers(0, 16, rows.shape).astype(np.int32)
        others[:, : t + 1] = rows[:, : t + 1]
        logits = np.asarray(run(params, others)[1], np.float64).reshape(2, 3, 16)[:, t]
        log_sums = np.log(np.exp(logits).sum(axis=1))
        losses.append(log_sums - logits[np.arange(2), rows[:, t + 1]])
    np.testing.assert_allclose(run(params, rows)[0], np.mean(losses), rtol=1e-4)


def test_initial_weights_have_the_types_of_trained_ones():
    """Otherwise, the second training step would compile again."""
    specs = DEMOS["qwen3_5"].make(16, 2, 64).specs()
    shapes = jax.eval_shape(lambda key: init_params(specs, key), jax.random.key(0))
    assert not any(x.weak_type for x in jax.tree.leaves(shapes))


def test_a_text_of_less_than_a_batch_is_evaluated():
    model = DEMOS["llama"].make(16, 1, 64)
    rows = np.random.default_rng(0).integers(0, 16, (2, 4)).astype(np.int32)
    params = random_params(model.specs(), 0)
    assert np.isfinite(evaluate(model, params, [Document(row, 0) for row in rows], 3))


@pytest.mark.slow
def test_a_repeating_text_is_learnt(model, tmp_path):
    text = np.tile(np.arange(16, dtype=np.int32), 40)
    params, log = train_target(
        model,
        [Document(text, 0)],
        tmp_path,
        Schedule(steps=30, batch_size=4, length=32, learning_rate=5e-3, seed=0),
    )
    assert log[-1]["loss"] < 0.5 < np.log(16)
    assert evaluate(model, params, [Document(text, 0)], 32) < 0.5
