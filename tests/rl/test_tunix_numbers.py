"""Tunix gets the tokens and log-probabilities that transformers computes for its actor."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.tunix_stub import CONFIG, EOS, PAD, Letters, Mode, made, reference_logps

from specjax.device.models.registry import load_model
from specjax.rl.nnx import PolicyModule
from specjax.rl.tunix import RolloutOutput

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy(target):
    return PolicyModule(*load_model(target.folder, np.dtype("float32")))


LONGER = replace(CONFIG, max_tokens_to_generate=40, temperature=0.3)  # to evaluate


@pytest.fixture(scope="module")
def rollout(target, policy):
    opened = made(target, {Mode.EVAL: LONGER, Mode.TRAIN: CONFIG}, rollout_actor=policy)
    yield opened
    opened.close()


def test_outputs_are_tunixs_and_equal_prompts_are_samples_of_one_request(
    rollout, target, monkeypatch
):
    calls, generate = [], rollout.engine.generate

    def record(*given, **options):
        calls.append(given)
        return generate(*given, **options)

    monkeypatch.setattr(rollout.engine, "generate", record)
    prompts = ["one", "a longer", "one", "one", "a longer", "x"]
    output = rollout.generate(prompts, replace(CONFIG, seed=3))
    ((asked, params),) = calls
    assert asked == [Letters().encode(text) for text in ("one", "a longer", "x")]
    assert [one.n for one in params] == [3, 2, 1]
    assert len({tuple(tokens) for tokens in output.tokens}) == 6  # all drawn differently
    assert output.logits is None
    assert [field.name for field in fields(output)] == [one.name for one in fields(RolloutOutput)]
    padded = output.left_padded_prompt_tokens
    assert padded.shape == (6, 16) and padded.dtype == np.int32
    for i, prompt in enumerate(prompts):
        ids, tokens = Letters().encode(prompt), output.tokens[i]
        assert padded[i].tolist() == [PAD] * (16 - len(ids)) + ids
        assert tokens.dtype == np.int32 and output.text[i] == Letters().decode(tokens.tolist())
        assert len(tokens) == 12 or tokens[-1] == EOS
        expected = reference_logps(target, ids, tokens.tolist(), 0.9)
        np.testing.assert_allclose(output.logprobs[i], expected, atol=1e-4)


def test_more_of_sampling_params_may_be_asked_for(rollout):
    output = rollout.generate(["bias"], replace(CONFIG, top_p=None, top_k=-1), logit_bias={20: 1e4})
    assert set(output.tokens[0].tolist()) == {20}


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_logps_are_recomputed_at_the_temperature_of_training(target, rollout, monkeypatch, pad):
    monkeypatch.setattr(rollout._tokenizer, "pad", pad)
    rollout.generate(["x"], replace(LONGER, top_k=5))
    prompts = [[3, pad, 5], [7], [9, 8, 7, 6, 5], [3]]
    completions = [[10, 11, EOS], [12, 13, 14, 15], [EOS], []]
    padded = np.array([[pad] * (6 - len(p)) + p for p in prompts])
    tokens = np.array([c + [pad] * (5 - len(c)) for c in completions])
    found = rollout.get_per_token_logps(jnp.asarray(padded), jnp.asarray(tokens))
    assert found.shape == (4, 5) and found.dtype == jnp.float32
    for row, prompt, completion in zip(np.asarray(found), prompts, completions, strict=True):
        expected = reference_logps(target, prompt, completion, 0.9)
        np.testing.assert_allclose(row[: len(completion)], expected, atol=1e-4)
        if pad != EOS:
            assert not np.any(row[len(completion) :])


def test_every_update_is_a_new_version_and_passes_tunixs_guard(rollout, policy, compilations):
    state = nnx.state(policy, nnx.Param)
    scaled = jax.tree.map(lambda x: jnp.asarray(np.asarray(x) * np.float32(1.3)), state)
    version = rollout.engine.version

    def logprobs():
        return rollout.engine.score([([1, 2, 3], [4, 5, 6])])[0].logprobs.tolist()

    before = logprobs()
    rollout.update_params(scaled, (nnx.Param,))
    changed = logprobs()
    with (
        compilations.none_expected(),
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        rollout.update_params(state, (nnx.Param,))
    assert logprobs() == before != changed
    assert rollout.engine.version == version + 2
