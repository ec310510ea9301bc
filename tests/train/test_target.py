"""The target's loss against its definition, and a model that can be learnt."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.device.models.qwen3_5 import ATTENTION, DELTA, Qwen35
from specjax.train.data import Document
from specjax.train.loop import Schedule
from specjax.train.target import DEMOS, evaluate, init_params, next_token_loss, train_target


@pytest.fixture(scope="module", params=DEMOS)
def model(request):
    small = DEMOS[request.param](16, 2, 64)
    return replace(small, layer_types=(DELTA, ATTENTION)) if isinstance(small, Qwen35) else small


def test_loss_is_the_mean_negative_log_probability(model):
    params = init_params(model.specs(), jax.random.key(0))
    rows = jnp.array(np.random.default_rng(0).integers(0, 16, (2, 4)).astype(np.int32))
    documents = [Document(np.asarray(row), 0) for row in rows]
    loss = jax.jit(lambda params, rows: next_token_loss(model, params, rows))
    # A row on its own, one prefix at a time: the loss may not see later tokens.
    losses = []
    for row in np.asarray(rows):
        for t in range(1, 4):
            whole, without = (
                float(loss(params, jnp.array(row[None, :n]))) * (n - 1) for n in (t + 1, max(t, 2))
            )
            losses.append(whole - (without if t > 1 else 0.0))
    np.testing.assert_allclose(loss(params, rows), np.mean(losses), rtol=1e-4)
    assert np.isfinite(evaluate(model, params, documents, 3))


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
