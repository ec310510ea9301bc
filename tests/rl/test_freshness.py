"""Acceptance is reported per weights version, and policies learn of new versions."""

from dataclasses import replace

import pytest
from support.engines import K
from support.rollouts import PROMPTS, SAMPLED, noisy

from specjax.host.speculation.policy import StaticPolicy

pytestmark = pytest.mark.usefixtures("simulated_device")


def test_acceptance_falls_and_is_told_by_version(engine, original):
    """The report has the growth of the engine's counters between changes of weights."""
    engine.generate(PROMPTS, SAMPLED)  # which is of weights before
    engine.update_weights(original)
    first = engine.metrics()
    engine.generate(PROMPTS, replace(SAMPLED, temperature=0.0, n=1))
    second = engine.metrics()
    engine.update_weights(noisy(original, 4))
    engine.generate(PROMPTS, SAMPLED)
    before, now = engine.acceptance()[-2:]
    assert (before.version, now.version) == (engine.version - 1, engine.version)
    accepted = second.num_accepted_tokens - first.num_accepted_tokens
    rounds = second.num_drafts - first.num_drafts
    assert before.num_drafts == rounds
    assert before.mean_acceptance_length == pytest.approx(1 + accepted / rounds)
    assert before.num_tokens == second.num_generation_tokens - first.num_generation_tokens
    assert set(now.k_histogram) == {K} and now.mean_k == K
    assert now.acceptance_length(1) == 1 + now.acceptance_rate_per_pos[0]


def test_a_policy_hears_of_other_weights(build, original):
    engine = build()
    told = []

    class Policy(StaticPolicy):
        def target_changed(self):
            told.append("target")

        def drafter_changed(self):
            told.append("drafter")

    engine._engine.scheduler.policy = Policy(K)
    engine.update_weights(original)
    engine.update_drafter(engine.params.drafter)
    engine.update_weights(original, drafter=engine.params.drafter)
    assert told == ["target", "drafter", "target", "drafter"]
