"""Tunix gets the tokens and log-probabilities of its actor, as transformers has them."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.engines import VOCAB
from support.tunix_stub import CONFIG, EOS, OPTIONS, PAD, Letters, Mode, reference_logps

from specjax.device.models.registry import load_model
from specjax.rl.nnx import PolicyModule
from specjax.rl.tunix import RolloutOutput, TunixRollout
from specjax.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def policy(target):
    return PolicyModule(*load_model(target.folder, np.dtype("float32")))


@pytest.fixture(scope="module")
def rollout(target, policy):
    made = TunixRollout(
        rollout_actor=policy,
        tokenizer=Letters(),
        mesh=None,
        rollout_config=CONFIG,
        model=target.folder,
        **OPTIONS,
    )
    yield made
    made.close()


def test_the_output_is_tunixs(rollout, target):
    prompts = ["hello", "a longer one", "x"]
    output = rollout.generate(prompts, CONFIG)
    assert output.logits is None
    assert [field.name for field in fields(output)] == [
        field.name for field in fields(RolloutOutput)
    ]
    assert output.left_padded_prompt_tokens.shape == (3, 16)
    assert output.left_padded_prompt_tokens.dtype == np.int32
    for prompt, padded, tokens, text, logprobs in zip(
        prompts,
        output.left_padded_prompt_tokens,
        output.tokens,
        output.text,
        output.logprobs,
        strict=True,
    ):
        ids = Letters().encode(prompt)
        assert padded.tolist() == [PAD] * (16 - len(ids)) + ids
        assert tokens.dtype == np.int32 and text == Letters().decode(tokens.tolist())
        assert len(tokens) == 12 or tokens[-1] == EOS
        expected = reference_logps(target, ids, tokens.tolist(), 0.9)
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_greedy_is_what_transformers_says(rollout, target):
    import torch

    output = rollout.generate(["greedy"], replace(CONFIG, temperature=0.0))
    ids = torch.tensor([Letters().encode("greedy")])
    expected = target.hf.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=EOS)
    assert output.tokens[0].tolist() == expected[0, ids.shape[1] :].tolist()


def test_equal_prompts_are_samples_of_one_request(rollout, monkeypatch):
    calls = []
    generate = rollout.engine.generate
    monkeypatch.setattr(
        rollout.engine, "generate", lambda *given: calls.append(given) or generate(*given)
    )
    prompts = ["one", "two", "one", "one", "two", "three"]
    output = rollout.generate(prompts, replace(CONFIG, seed=3))
    ((asked, params),) = calls
    assert asked == [Letters().encode(text) for text in ("one", "two", "three")]
    assert [one.n for one in params] == [3, 2, 1]
    assert len({tuple(tokens) for tokens in output.tokens}) == 6  # all drawn differently
    for prompt, padded, tokens, logprobs in zip(
        prompts, output.left_padded_prompt_tokens, output.tokens, output.logprobs, strict=True
    ):
        ids = Letters().encode(prompt)
        assert padded[-len(ids) :].tolist() == ids
        (score,) = rollout.engine.score([(ids, tokens.tolist())], SamplingParams(temperature=0.9))
        np.testing.assert_allclose(score.logprobs, logprobs, atol=1e-4)


def test_calls_may_ask_for_anything_without_compiling(rollout, compilations):
    rollout.generate(["warm up"], replace(CONFIG, top_k=3, top_p=0.9))
    with compilations.none_expected():
        output = rollout.generate(
            ["shorter", "and another"],
            replace(CONFIG, max_tokens_to_generate=5, temperature=0.3, top_k=7, top_p=None),
        )
        assert all(len(tokens) <= 5 for tokens in output.tokens)
        rollout.generate(["q"], replace(CONFIG, top_k=-1, max_prompt_length=3, seed=1))


def test_more_of_sampling_params_may_be_given(rollout):
    output = rollout.generate(["bias"], CONFIG, logit_bias={20: 1e4})
    assert set(output.tokens[0].tolist()) == {20}
    with pytest.raises(ValueError, match="generate takes no beam_size, seed; of SamplingParams"):
        rollout.generate(["x"], CONFIG, beam_size=2, seed=1)


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_logps_are_recomputed_at_the_temperature_of_training(target, rollout, monkeypatch, pad):
    monkeypatch.setattr(rollout._tokenizer, "pad", pad)
    rollout.generate(["x"], replace(CONFIG, temperature=0.3, top_k=5))  # to evaluate
    prompts = [[3, pad, 5], [7], [9, 8, 7, 6, 5]]
    completions = [[10, 11, EOS], [12, 13, 14, 15], [EOS]]
    padded = np.array([[pad] * (6 - len(p)) + p for p in prompts])
    tokens = np.array([c + [pad] * (5 - len(c)) for c in completions])
    found = rollout.get_per_token_logps(jnp.asarray(padded), jnp.asarray(tokens))
    assert found.shape == (3, 5) and found.dtype == jnp.float32
    for row, prompt, completion in zip(np.asarray(found), prompts, completions, strict=True):
        expected = reference_logps(target, prompt, completion, 0.9)
        np.testing.assert_allclose(row[: len(completion)], expected, atol=1e-4)
        if pad != EOS:
            assert not np.any(row[len(completion) :])


def test_an_empty_completion_has_no_logps(rollout):
    logps = rollout.get_per_token_logps(np.array([[PAD, 3]]), np.array([[PAD, PAD]]))
    assert not np.asarray(logps).any()


def scaled(state, factor):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x) * np.float32(factor)), state)


def test_every_update_is_a_new_version(rollout, policy, compilations):
    state = nnx.state(policy, nnx.Param)
    version = rollout.engine.version

    def logprobs():
        return rollout.engine.score([([1, 2, 3], [4, 5, 6])])[0].logprobs.tolist()

    before = logprobs()
    rollout.update_params(scaled(state, 1.3), (nnx.Param,))
    changed = logprobs()
    with compilations.none_expected():
        rollout.update_params(state, (nnx.Param,))
        assert logprobs() == before != changed
    assert rollout.engine.version == version + 2


def test_updates_pass_tunixs_guard(rollout, policy):
    state = nnx.state(policy, nnx.Param)
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        rollout.update_params(state, (nnx.Param,))


def test_training_counts_for_the_temperature_of_logps(target):
    longer = replace(CONFIG, max_tokens_to_generate=40, temperature=0.3)
    config = {Mode.EVAL: longer, Mode.TRAIN: CONFIG}
    made = TunixRollout(None, Letters(), None, config, model=target.folder, **OPTIONS)
    with made.engine:
        made.generate(["x" * 16], longer)
        found = made.get_per_token_logps(np.array([[PAD, 3]]), np.array([[4, 5]]))
        np.testing.assert_allclose(found[0], reference_logps(target, [3], [4, 5], 0.9), atol=1e-4)


def test_the_engine_starts_with_the_actors_weights(checkpoints, target):
    other = checkpoints.target(vocab_size=VOCAB, seed=5)
    actor = PolicyModule(*load_model(other.folder, np.dtype("float32")))
    made = TunixRollout(actor, Letters(), None, CONFIG, model=target.folder, **OPTIONS)
    with made.engine:
        output = made.generate(["start"], replace(CONFIG, temperature=1.0))
        ids = Letters().encode("start")
        expected = reference_logps(other, ids, output.tokens[0].tolist(), 1.0)
        np.testing.assert_allclose(output.logprobs[0], expected, atol=1e-4)
