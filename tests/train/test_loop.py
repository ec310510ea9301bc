"""A killed and resumed run gives the same bits as an uninterrupted run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train.loop import Schedule, fit

pytestmark = pytest.mark.every_jax


def _fit(directory, steps_before_a_kill=None, steps=12, bias="b"):
    params = {"w": jnp.ones((4, 3)), bias: jnp.zeros(3)}
    frozen = jnp.arange(12.0).reshape(4, 3) / 10

    def loss(params, frozen, x, key):
        noise = 0.1 * jax.random.normal(key, x.shape)
        error = (x + noise) @ (params["w"] - frozen) + params[bias][None]
        return (error**2).mean(), {"bias": jnp.abs(params[bias]).max()}

    def batches(step):
        if step == steps_before_a_kill:
            raise KeyboardInterrupt
        return jnp.array(np.random.default_rng(step).standard_normal((8, 4)), jnp.float32)

    labels = {"w": "muon", bias: "adamw"}
    schedule = Schedule(steps=steps, batch_size=8, length=1, learning_rate=0.05, seed=0)
    return fit(
        params, frozen, labels, loss, batches, directory, schedule, log_every=4, save_every=3
    )


@pytest.mark.slow
def test_a_killed_run_resumes_bit_identically(tmp_path, capsys):
    whole, log = _fit(tmp_path / "whole")
    told = capsys.readouterr().err
    assert re.match(
        r"compiling the update\nmemory of activations, by the compiled step: \d+ MiB\n", told
    )
    assert "minutes for the other 6 steps" in told
    assert re.findall(r"^step (\d+)  .*loss .* s/step$", told, re.MULTILINE) == ["4", "8", "12"]
    assert [row["step"] for row in log] == [4, 8, 12]
    with pytest.raises(KeyboardInterrupt):
        _fit(tmp_path / "killed", steps_before_a_kill=7)
    resumed, log = _fit(tmp_path / "killed")
    assert log[0]["step"] == 8
    for name in whole:
        np.testing.assert_array_equal(whole[name], resumed[name])


def test_steps_between_rows_are_told_when_they_take_long(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("specjax.train.loop.Pace.is_due", lambda _: True)
    _fit(tmp_path, steps=5)
    told = re.findall(r"^step (\d+) of 5$", capsys.readouterr().err, re.MULTILINE)
    assert told == ["1", "2", "3"]


@pytest.mark.slow
def test_a_folder_of_another_run_is_refused(tmp_path):
    _fit(tmp_path, steps=4)
    with pytest.raises(ValueError, match=f"{tmp_path} has a checkpoint .* choose another folder"):
        _fit(tmp_path, bias="another name")


@pytest.mark.slow
def test_a_finished_run_is_only_read(tmp_path):
    whole, _ = _fit(tmp_path)
    again, log = _fit(tmp_path, steps_before_a_kill=0)
    assert log == []
    np.testing.assert_array_equal(whole["w"], again["w"])
