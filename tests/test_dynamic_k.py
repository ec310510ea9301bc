"""K chosen anew in every step, by rules and by what was measured: tokens and counts on a device."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

import numpy as np
import pytest
from support.dynamic_k import Recording, generate, requests_of, write_profile
from support.engines import K, make_llm
from support.shared_models import EOS, eagle3, llama, of_few_words

from specjax import SamplingParams
from specjax.host.speculation.acceptance import Acceptance
from specjax.host.speculation.lockstep import LockstepPolicy
from specjax.host.speculation.policy import GoodputPolicy, StaticPolicy, TablePolicy
from specjax.host.speculation.step_cost import StepCost

MOST = K


@pytest.fixture(scope="module")
def folder(checkpoints):
    """Without an end, so that outputs are as long as they may be."""
    folder = checkpoints.copy(llama(checkpoints).folder, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    return of_few_words(checkpoints, folder)


@pytest.fixture(scope="module")
def head(checkpoints):
    return of_few_words(checkpoints, eagle3(checkpoints).folder)


@pytest.fixture(scope="module")
def llm(folder, head):
    with make_llm(folder, "eagle3", head, speculation={"adaptive": True}) as made:
        yield made


@pytest.fixture(scope="module")
def work(folder):
    """Prompts, parameters, and what an engine without a drafter makes of them.

    The last one runs on when all others have ended.
    """
    rng = np.random.default_rng(0)
    lengths = (3, 20, 7, 40, 1, 12, 33, 9)
    prompts = [rng.integers(0, EOS, length).tolist() for length in lengths]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12 + 5 * i + 40 * (i == 7))
        for i in range(len(prompts))
    ]
    with make_llm(folder) as plain:
        return prompts, params, generate(plain, prompts, params)


def new_rounds(llm, before):
    after = llm.metrics().k_histogram
    return {k: n - before.get(k, 0) for k, n in after.items() if n > before.get(k, 0)}


# --- the ways to ask for it -----------------------------------------------------------------------


def test_adaptive_changes_nothing_but_k(llm, work):
    prompts, params, expected = work
    before = llm.metrics().k_histogram
    assert generate(llm, prompts, params) == expected
    assert new_rounds(llm, before)
    policy = llm.engine.scheduler.policy
    assert isinstance(policy, GoodputPolicy) and policy.choices == (0, 1, 2, 3)
    assert llm.metrics().num_compiles_after_warmup == 0


def test_a_policy_learns_the_times_of_every_shape_as_it_begins(folder, head):
    """The replays: no request has run when the policy is made."""
    with make_llm(folder, "eagle3", head, decode_batches=(1, 4)) as llm:
        llm.engine.set_policy(policy := GoodputPolicy((0, MOST), None, Acceptance(MOST)))
        times = np.array([[policy.cost.ms(b, k) for k in (0, MOST)] for b in (1, 4)])
    assert np.all(times > 0)
    assert np.all(np.diff(times, axis=0) >= 0) and np.all(np.diff(times, axis=1) >= 0)


def test_a_table_is_followed(folder, head, work):
    prompts, params, expected = work
    table = [[1, 1, 3], [2, 2, 1], [4, 9, 0]]
    speculation = {"num_speculative_tokens_per_batch_size": table}
    with make_llm(folder, "eagle3", head, speculation=speculation) as llm:
        policy = llm.engine.scheduler.policy
        assert policy == TablePolicy(((1, 1, 3), (2, 2, 1), (4, 9, 0)))
        watched = Recording(policy.choices, policy.choose)
        llm.engine.set_policy(watched)
        assert generate(llm, prompts, params) == expected
    by_size = {}
    for load in watched.loads:
        if load.num_sequences:
            by_size.setdefault(load.num_sequences, set()).add(policy.choose(load))
    assert by_size == {1: {3}, 2: {1}, 3: {1}, 4: {0}}
    seen = {(round.k, sum(round.verdicts.values())) for round in watched.rounds}
    assert {k for k, _ in seen} == {0, 1, 3}


def test_a_profile_changes_nothing_but_k(tmp_path, folder, head, work):
    prompts, params, expected = work
    speculation = {"dynamic_config_path": write_profile(tmp_path)}
    with make_llm(folder, "eagle3", head, speculation=speculation) as llm:
        assert generate(llm, prompts, params) == expected
        policy = llm.engine.scheduler.policy
        assert isinstance(policy, GoodputPolicy) and policy.choices == (0, 1, 2, 3)


# --- limits of requests ---------------------------------------------------------------------------


def test_a_request_may_ask_for_fewer_drafts(llm, work):
    prompts, _, _ = work
    limits = [0, 1, 2, None, 7]
    llm.engine.set_policy(StaticPolicy(MOST))
    watched = Recording((MOST,), lambda load: MOST)
    outputs = {}
    for is_limited in (False, True):
        params = [
            SamplingParams(temperature=0, max_tokens=20, num_speculative_tokens=limit)
            if is_limited
            else SamplingParams(temperature=0, max_tokens=20)
            for limit in limits
        ]
        outputs[is_limited] = generate(llm, prompts[: len(limits)], params)
        if not is_limited:
            llm.engine.set_policy(watched)
    assert outputs[True] == outputs[False]
    most = {limit: [] for limit in limits}
    for load in watched.loads:
        for _, limit in load.members:
            assert limit <= MOST
    for limit in limits:
        params = SamplingParams(temperature=0, max_tokens=20, num_speculative_tokens=limit)
        before = llm.metrics()
        generate(llm, prompts[:1], params)
        after = llm.metrics()
        num_drafts = after.num_draft_tokens - before.num_draft_tokens
        num_rounds = after.num_decode_steps - before.num_decode_steps
        most[limit] = num_drafts / num_rounds
    assert most[0] == 0 < most[1] <= 1 < most[2] <= 2 < most[None] == most[7] <= MOST


def test_k_is_no_more_than_anybody_asked_for(llm, work):
    """Drafts are cheap by this cost; yet nobody wants them."""
    prompts, _, _ = work
    cost = StepCost({1: {0: 1.0, 3: 1.1}}, ks=range(4))
    policy = GoodputPolicy(
        range(4), cost, Acceptance(3, [0.9, 0.8, 0.7]), learns_cost=False, learns_acceptance=False
    )
    for limit, expected in (0, {0}), (1, {0, 1}), (None, {0, 1, 2, 3}):
        llm.engine.set_policy(policy)
        before = llm.metrics().k_histogram
        params = SamplingParams(temperature=0, max_tokens=20, num_speculative_tokens=limit)
        generate(llm, prompts[:3], params)
        assert set(new_rounds(llm, before)) <= expected
        assert max(new_rounds(llm, before)) == max(expected)


def test_verdicts_are_what_the_counters_count(llm, work):
    prompts, params, _ = work
    watched = Recording((0, 1, 3), lambda load: (0, 1, 3)[load.num_context % 3])
    llm.engine.set_policy(watched)
    before = llm.metrics()
    generate(llm, prompts, params)
    after = llm.metrics()
    accepted = np.zeros(MOST, int)
    for outcome in watched.rounds:
        for verdict, count in outcome.verdicts.items():
            assert verdict.num_accepted <= verdict.num_drafts <= outcome.k
            assert verdict.group in (0.0, 0.8)
            accepted[: verdict.num_accepted] += count
    counted = np.subtract(after.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos)
    np.testing.assert_array_equal(counted[:MOST], accepted)


# --- measuring and switching ----------------------------------------------------------------------


def test_a_policy_that_measures_does_not_disturb_requests(llm, work):
    engine = llm.engine
    engine.set_policy(StaticPolicy(1))
    (request,) = requests_of(20, 1, first=100)
    engine.add(request)
    engine.step()
    with pytest.raises(ValueError, match="requests are running"):
        engine.set_policy(GoodputPolicy((0, 1), None, Acceptance(1)))
    engine.abort(100)
    engine.drain()
    prompts, params, expected = work
    assert generate(llm, prompts, params) == expected
    engine.set_policy(GoodputPolicy((0, 1), None, Acceptance(1)))
    assert generate(llm, prompts, params) == expected


def test_a_round_of_the_policy_before_teaches_nothing(llm):
    """K = 3 is on its way when a policy comes that knows of 0 and 1."""
    engine = llm.engine
    engine.set_policy(StaticPolicy(MOST))
    (request,) = requests_of(30, 1, first=200)
    (sample,) = engine.add(request)
    for _ in range(3):
        engine.step()
    cost = StepCost({1: {0: 1.0, 1: 1.1}}, batches=engine.config.decode_batches)
    engine.set_policy(GoodputPolicy((0, 1), cost, Acceptance(1)))
    while engine.has_work:
        engine.step()
    assert sample.finish_reason == "length" and sample.error is None


@dataclass
class Meeting:
    """Replicas in threads, in lock step."""

    rank: int
    shared: dict
    barrier: Barrier

    @property
    def is_leader(self):
        return self.rank == 0

    def gather(self, load):
        self.shared[self.rank] = load
        self.barrier.wait()
        return [self.shared[rank] for rank in range(2)]

    def broadcast(self, k):
        if self.is_leader:
            self.shared["k"] = k
        self.barrier.wait()
        chosen = self.shared["k"]
        self.barrier.wait()
        return chosen


def test_replicas_in_lock_step_run_the_same_k(folder, head, work):
    """Two engines with different requests: one of them decides, one runs dry before the other."""
    prompts, params, expected = work
    shared, barrier = {}, Barrier(2, timeout=60)
    cost = StepCost({1: {0: 1.0, 3: 1.3}, 4: {0: 1.0, 3: 3.0}}, ks=range(4))
    with (
        make_llm(folder, "eagle3", head) as one,
        make_llm(folder, "eagle3", head) as other,
    ):
        engines, shares = [one.engine, other.engine], [slice(0, 6), slice(6, 8)]
        made = [
            [
                llm.make_request({"prompt_token_ids": p}, q)
                for p, q in zip(prompts[s], params[s], strict=True)
            ]
            for llm, s in zip((one, other), shares, strict=True)
        ]
        for rank, engine in enumerate(engines):
            policy = GoodputPolicy(range(4), cost, Acceptance(MOST), learns_cost=False)
            engine.set_policy(LockstepPolicy(policy, Meeting(rank, shared, barrier)))
        samples = [
            [s for request in requests for s in engine.add(request)]
            for engine, requests in zip(engines, made, strict=True)
        ]
        ks = [[], []]
        with ThreadPoolExecutor(2) as pool:
            while any(engine.has_work for engine in engines):
                list(pool.map(lambda engine: engine.step(), engines))
                for rank, engine in enumerate(engines):
                    ks[rank].append(dict(engine.metrics().k_histogram))
    outputs = [sample.output for part in samples for sample in part]
    assert outputs == expected
    # Whatever K a replica ran, it ran when the leader's was the same.
    assert set(ks[1][-1]) <= set(ks[0][-1])
