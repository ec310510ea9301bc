"""What is asked of a rollout engine, what it refuses, and what a batch of rollouts is."""

from dataclasses import replace

import pytest
from support.rollouts import PROMPTS, SAMPLED, SETTINGS, assert_same

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


def test_samples_share_the_pages_of_their_prompt(engine):
    before = engine.metrics()
    engine.generate([list(range(1, 29))], replace(SAMPLED, n=4))
    after = engine.metrics()
    assert after.prefix_cache_hits - before.prefix_cache_hits == 3 * 24
    assert after.num_prompt_tokens - before.num_prompt_tokens == 28 + 3 * 4


def test_a_stream_gives_what_a_batch_does(build):
    batch = build().generate(PROMPTS, SAMPLED)
    streamed = list(build().stream(PROMPTS, SAMPLED))
    streamed.sort(key=lambda one: (one.prompt_index, one.sample_index))
    assert_same(streamed, batch)


@pytest.mark.parametrize("version", [0, -1, 1.5, "2", True])
def test_versions_rise(engine, original, version):
    now = engine.version
    with pytest.raises(ValueError, match="version"):
        engine.update_weights(original, version)
    with pytest.raises(ValueError, match=f"version={now}"):
        engine.update_weights(original, now)
    assert engine.version == now


def test_parameters_that_are_not_for_rollouts(engine):
    for name in "logprobs", "prompt_logprobs":
        with pytest.raises(ValueError, match=name):
            engine.generate(PROMPTS, SamplingParams(**{name: 1}))
    with pytest.raises(ValueError, match="SamplingParams"):
        engine.generate(PROMPTS, {"temperature": 1})
    with pytest.raises(ValueError, match="pause='stop'"):
        engine.pause("stop")
    with pytest.raises(ValueError, match="level=3"):
        engine.sleep(3)
    batch = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="has ended"):
        engine.generate(batch)
    stream = engine.stream(PROMPTS, SamplingParams(n=2))
    with pytest.raises(ValueError, match="two calls"):
        engine.generate([batch[0], [1, 2]])
    stream.close()


def test_settings_that_a_rollout_engine_makes_itself(target):
    with pytest.raises(ValueError, match="logprobs_mode='raw' "):
        RolloutEngine(target.folder, logprobs_mode="raw", **SETTINGS)
    with pytest.raises(ValueError, match="always_logprobs=True was removed"):
        RolloutEngine(target.folder, always_logprobs=True, **SETTINGS)
    with pytest.raises(ValueError, match="raw_logprobs"):
        RolloutEngine(target.folder, raw_logprobs="yes", **SETTINGS)
    synthetic = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "verification": "synthetic",
        "synthetic_acceptance_length": 2,
    }
    with pytest.raises(ValueError, match="synthetic"):
        RolloutEngine(target.folder, speculative_config=synthetic, **SETTINGS)
    with pytest.raises(TypeError, match="speed"):
        RolloutEngine(target.folder, speed="high", **SETTINGS)


def test_drafters_without_weights(build):
    with pytest.raises(ValueError, match="no drafter"):
        build(drafts=False).update_drafter({})
    ngram = build(drafts={"method": "ngram", "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="no drafter"):
        ngram.update_drafter({})
