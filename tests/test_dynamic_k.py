"""K that changes in every step, by rules and by measurements: tokens and counts on a device."""

import numpy as np
import pytest
from support.dynamic_k import Recording, requests_of
from support.engines import generate_tokens, make_llm, random_prompts
from support.shared_models import EOS, eagle3, llama, of_few_words, without_end

from specjax import SamplingParams
from specjax.host.speculation.acceptance import Acceptance
from specjax.host.speculation.policy import GoodputPolicy, StaticPolicy
from specjax.host.speculation.step_cost import StepCost

pytestmark = pytest.mark.slow

K = 3
PROMPTS = random_prompts(3, 20, 7, 40, 1, 12, 33, 9, vocab_size=EOS)
# The last request runs on when all others have ended.
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12 + 5 * i + 40 * (i == 7))
    for i in range(8)
]


@pytest.fixture(scope="module")
def folder(checkpoints):
    return of_few_words(checkpoints, without_end(checkpoints, llama(checkpoints).folder))


@pytest.fixture(scope="module")
def llm(checkpoints, folder):
    head = of_few_words(checkpoints, eagle3(checkpoints).folder)
    with make_llm(folder, "eagle3", head, k=K, speculation={"adaptive": True}) as made:
        yield made


@pytest.fixture(scope="module")
def expected(folder):
    """The tokens of an engine without a drafter."""
    with make_llm(folder) as plain:
        return generate_tokens(plain, PROMPTS, PARAMS)


def test_adaptive_changes_nothing_but_k(llm, expected):
    policy = llm.engine.scheduler.policy
    assert isinstance(policy, GoodputPolicy) and policy.choices == (0, 1, 2, 3)
    assert generate_tokens(llm, PROMPTS, PARAMS) == expected
    assert llm.metrics().k_histogram.keys() <= {0, 1, 2, 3}
    assert llm.metrics().num_compiles_after_warmup == 0


def test_a_request_may_ask_for_fewer_drafts(llm):
    """Requests with different limits run together, and then one at a time."""
    limits = [0, 1, 2, None, 7]
    free = SamplingParams(temperature=0, max_tokens=20)
    params = [free.clone() for _ in limits]
    for one, limit in zip(params, limits, strict=True):
        one.num_speculative_tokens = limit
    llm.engine.set_policy(StaticPolicy(K))
    expected = generate_tokens(llm, PROMPTS[: len(limits)], free)
    llm.engine.set_policy(watched := Recording((K,), lambda load: K))
    assert generate_tokens(llm, PROMPTS[: len(limits)], params) == expected
    assert {n for load in watched.loads for n in load.requests.limits} == {0, 1, 2, K}
    most = []
    for one in params:
        before = llm.metrics()
        assert generate_tokens(llm, PROMPTS[:1], one) == expected[:1]
        after = llm.metrics()
        num_drafts = after.num_draft_tokens - before.num_draft_tokens
        most.append(num_drafts / (after.num_decode_steps - before.num_decode_steps))
    assert most[0] == 0 < most[1] <= 1 < most[2] <= 2 < most[3] == most[4] <= K


def test_verdicts_are_what_the_counters_count(llm):
    watched = Recording((0, 1, 3), lambda load: (0, 1, 3)[load.num_context % 3])
    llm.engine.set_policy(watched)
    before = llm.metrics()
    generate_tokens(llm, PROMPTS, PARAMS)
    after = llm.metrics()
    accepted = np.zeros(K, int)
    for outcome in watched.rounds:
        for verdict, count in outcome.verdicts.items():
            assert verdict.num_accepted <= verdict.num_drafts <= outcome.k
            assert verdict.group in (0.0, 0.8)
            accepted[: verdict.num_accepted] += count
    counted = np.subtract(after.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos)
    np.testing.assert_array_equal(counted[:K], accepted)


def test_a_policy_that_measures_does_not_disturb_requests(llm, expected):
    engine = llm.engine
    engine.set_policy(StaticPolicy(1))
    engine.add(*requests_of(20, 1, first=100))
    engine.step()
    with pytest.raises(ValueError, match="requests are running"):
        engine.set_policy(GoodputPolicy((0, 1), None, Acceptance(1)))
    engine.abort(100)
    engine.drain()
    assert generate_tokens(llm, PROMPTS, PARAMS) == expected
    engine.set_policy(policy := GoodputPolicy((0, 1), None, Acceptance(1)))
    assert 0 < policy.cost.ms(4, 0) <= policy.cost.ms(4, 1), "of replays, as it begins"
    assert generate_tokens(llm, PROMPTS, PARAMS) == expected


def test_a_round_of_the_policy_before_teaches_nothing(llm):
    """A round with K = 3 is in flight when a policy is set that only knows K = 0 and 1."""
    engine = llm.engine
    engine.set_policy(StaticPolicy(K))
    (sample,) = engine.add(*requests_of(30, 1, first=200))
    for _ in range(3):
        engine.step()
    cost = StepCost({1: {0: 1.0, 1: 1.1}}, batches=engine.config.decode_batches)
    engine.set_policy(GoodputPolicy((0, 1), cost, Acceptance(1)))
    while engine.has_work:
        engine.step()
    assert sample.finish_reason == "length" and sample.error is None
