"""Calls of a rollout engine, errors for wrong calls, and batches of rollouts."""

from dataclasses import replace

import pytest
from support.rollouts import PROMPTS, SAMPLED, SETTINGS

from specjax import SamplingParams
from specjax.rl import RolloutEngine, Span

pytestmark = pytest.mark.usefixtures("simulated_device")


def test_a_batch_has_every_sample_of_every_prompt_in_order(engine):
    batch = engine.generate(PROMPTS, SAMPLED)
    assert [(one.prompt_index, one.sample_index) for one in batch] == [
        (prompt, sample) for prompt in range(len(PROMPTS)) for sample in range(2)
    ]
    for one in batch:
        assert one.prompt_token_ids.tolist() == PROMPTS[one.prompt_index]
        assert len(one.logprobs) == len(one.raw_logprobs) == len(one.token_ids) <= 20
        assert one.versions == (Span(engine.version, len(one.token_ids)),)
        assert one.params == SAMPLED and one.finish_reason in ("stop", "length")
    assert len({one.seed for one in batch}) == len(batch)


def test_rollouts_keep_the_parameters_they_were_drawn_under(engine):
    params = replace(SAMPLED, max_tokens=3)
    batch = engine.generate(PROMPTS[:1], params)
    params.max_tokens = 5
    assert {one.params.max_tokens for one in batch} == {3}


def test_calls_that_cannot_be_served(engine):
    def refused(words, do, *arguments):
        with pytest.raises(ValueError, match=words):
            do(*arguments)

    for name in "logprobs", "prompt_logprobs":
        refused(name, engine.generate, PROMPTS, SamplingParams(**{name: 1}))
    refused("SamplingParams", engine.generate, PROMPTS, {"temperature": 1})
    refused("pause='stop'", engine.pause, "stop")
    refused("level=3", engine.sleep, 3)
    batch = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=2))
    refused("has ended", engine.generate, batch)
    refused("two calls", engine.generate, [batch[0], [1, 2]])


SYNTHETIC = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "verification": "synthetic",
    "synthetic_acceptance_length": 2,
}


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("logprobs_mode", "raw", "logprobs_mode='raw' "),
        ("always_logprobs", True, "always_logprobs=True was removed"),
        ("raw_logprobs", "yes", "raw_logprobs"),
        ("speculative_config", SYNTHETIC, "synthetic"),
        ("speed", "high", "speed"),
    ],
)
def test_settings_that_a_rollout_engine_makes_itself(target, option, value, message):
    with pytest.raises((ValueError, TypeError), match=message):
        RolloutEngine(target.folder, **SETTINGS | {option: value})


def test_drafters_without_weights(build):
    for drafts in False, {"method": "ngram", "num_speculative_tokens": 2}:
        with pytest.raises(ValueError, match="no drafter"):
            build(drafts=drafts).update_drafter({})
