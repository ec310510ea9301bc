"""K chosen anew in every step, by rules and by what was measured, and nothing else changed."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from threading import Barrier

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import LLM, SamplingParams
from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Params
from specjax.device.verification import Draft
from specjax.dynamic_k import fingerprint
from specjax.engine import Engine
from specjax.host.scheduler import DecodePlan, Scheduler
from specjax.host.sequence import RowOutput
from specjax.host.speculation.acceptance import Acceptance
from specjax.host.speculation.lockstep import LockstepPolicy
from specjax.host.speculation.policy import GoodputPolicy, Rule, StaticPolicy, TablePolicy
from specjax.host.speculation.step_cost import StepCost
from specjax.metrics import Recorder
from specjax.request import Request

VOCAB, MAX_LEN, MOST = 32, 128, 3


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=1)


@pytest.fixture(scope="module")
def head(checkpoints, target):
    return checkpoints.eagle3(target, draft_vocab=20, num_aux=2).folder


def make_llm(target, head, **speculation):
    settings = {
        name: speculation.pop(name) for name in ("max_num_seqs", "exact") if name in speculation
    }
    return LLM(
        target.folder,
        speculative_config=None
        if head is None
        else {"method": "eagle3", "model": str(head)} | speculation,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=64,
        show_progress=False,
        **{"max_num_seqs": 4} | settings,
    )


@pytest.fixture(scope="module")
def llm(target, head):
    with make_llm(target, head, adaptive=True, num_speculative_tokens=MOST) as made:
        yield made


@pytest.fixture(scope="module")
def work(target):
    """Prompts, parameters, and what an engine without a drafter makes of them."""
    rng = np.random.default_rng(0)
    lengths = (3, 20, 7, 40, 1, 12, 33, 9)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12 + 5 * i)
        for i in range(len(prompts))
    ]
    with make_llm(target, None) as plain:
        return prompts, params, generate(plain, prompts, params)


def generate(llm, prompts, params):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, False)]


def new_rounds(llm, before):
    after = llm.metrics().k_histogram
    return {k: n - before.get(k, 0) for k, n in after.items() if n > before.get(k, 0)}


@dataclass
class Recording(Rule):
    """K by a function of the number of sequences; keeps what it saw."""

    choices: tuple
    choose_k: object
    is_learning = True
    loads: list = field(default_factory=list)
    rounds: list = field(default_factory=list)

    def choose(self, load):
        self.loads.append(load)
        return self.choose_k(load)

    def observe(self, outcome):
        self.rounds.append(outcome)


# --- the ways to ask for it -----------------------------------------------------------------------


def test_adaptive_changes_nothing_but_k(llm, work):
    prompts, params, expected = work
    before = llm.metrics().k_histogram
    assert generate(llm, prompts, params) == expected
    assert new_rounds(llm, before)
    policy = llm.engine.scheduler.policy
    assert isinstance(policy, GoodputPolicy) and policy.choices == (0, 1, 2, 3)
    assert llm.metrics().num_compiles_after_warmup == 0


def test_adaptive_learned_the_times_of_every_shape_as_it_began(llm):
    """The replays: no request had run when the policy was made."""
    llm.engine.set_policy(policy := GoodputPolicy((0, 1, 3), None, Acceptance(MOST)))
    times = [[policy.cost.ms(b, k) for k in (0, 1, 3)] for b in llm.engine.config.decode_batches]
    assert np.all(np.array(times) > 0)
    assert np.all(np.diff(times, axis=0) >= 0) and np.all(np.diff(times, axis=1) >= 0)


def test_a_table_is_followed(target, head, work):
    prompts, params, expected = work
    table = [[1, 1, 3], [2, 2, 1], [4, 9, 0]]
    with make_llm(
        target, head, num_speculative_tokens=MOST, num_speculative_tokens_per_batch_size=table
    ) as llm:
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


PROFILE = {
    "is_online": False,
    "batch_stats": {"1": {"0": 1.0, "1": 1.1, "3": 1.3}, "4": {"0": 1.0, "1": 9.0, "3": 20.0}},
    "max_num_speculative_tokens": 3,
    "acceptance_rate_per_pos": [0.8, 0.6, 0.5],
}


def write_profile(folder, **edits):
    path = folder / "profile.json"
    path.write_text(json.dumps(PROFILE | edits))
    return path


def test_a_profile_is_followed(tmp_path, target, head, work):
    """Its K says the most, too: 3 for one request, and none for three and four, padded alike."""
    prompts, params, expected = work
    with make_llm(target, head, dynamic_config_path=write_profile(tmp_path)) as llm:
        policy = llm.engine.scheduler.policy
        watched = Recording(policy.choices, policy.choose)
        llm.engine.set_policy(watched)
        assert generate(llm, prompts, params) == expected
    loads = [load for load in watched.loads if load.num_sequences]
    assert {policy.choose(load) for load in loads if load.num_sequences >= 3} == {0}
    alone = [load for load in loads if load.num_sequences == 1]
    # The last drafts of an output are of no use: then fewer are as good.
    assert max(policy.choose(load) for load in alone) == 3
    long = [load for load in alone if min(limit for _, limit in load.members) == MOST]
    assert {policy.choose(load) for load in long} == {3}


def test_a_profile_of_another_model_is_refused_unless_forced(tmp_path, target, head):
    path = write_profile(tmp_path, measured={"model": "feedfacefeedface"})
    with pytest.raises(ValueError, match="measured on another model.*dynamic_config_force=True"):
        make_llm(target, head, dynamic_config_path=path)
    make_llm(target, head, dynamic_config_path=path, dynamic_config_force=True).close()


def test_a_profile_of_this_model_is_taken(tmp_path, checkpoints, target, head, llm):
    own = fingerprint(llm.target, llm.engine.drafter, llm.engine.params)
    path = write_profile(tmp_path, measured={"model": own})
    make_llm(target, head, dynamic_config_path=path).close()
    other = checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=1, seed=5)
    with pytest.raises(ValueError, match="measured on another model"):
        make_llm(other, head, dynamic_config_path=path)


def test_more_drafts_than_the_profile_has_are_refused(tmp_path, target, head):
    path = write_profile(tmp_path)
    with pytest.raises(ValueError, match="num_speculative_tokens=4 exceeds.*=3 of .*profile.json"):
        make_llm(target, head, dynamic_config_path=path, num_speculative_tokens=4)


def test_a_malformed_profile_is_refused_before_anything_is_loaded(tmp_path, target):
    path = write_profile(tmp_path, acceptance_rate_per_pos=[0.5, 0.8, 0.1])
    with pytest.raises(ValueError, match="acceptance_rate_per_pos"):
        make_llm(target, "no/such/folder", dynamic_config_path=path)


def test_exact_mode_may_be_adaptive(target, head, work):
    """All rounds cost the same there, so all drafts are worth a try."""
    prompts, params, expected = work
    with make_llm(target, head, adaptive=True, num_speculative_tokens=2, exact=True) as llm:
        assert generate(llm, prompts[:3], params[:3]) == expected[:3]
        histogram = llm.metrics().k_histogram
    assert set(histogram) <= {0, 1, 2} and histogram[2] > 0.5 * sum(histogram.values())


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


def test_rates_are_of_drafts_that_could_have_stood():
    """A third draft is not missed in a round of one."""
    recorder = Recorder()
    for k, kept in (3, 2), (1, 2), (1, 1), (3, 4):
        rows = [RowOutput(list(range(kept)), k)]
        recorder.record_part(DecodePlan((), 1, k, k), rows, [kept])
    config = EngineConfig(max_model_len=16, num_pages=1)
    metrics = recorder.snapshot(
        Scheduler(config, StaticPolicy(0)), num_compilations=0, num_late=0, compile_seconds=0.0
    )
    assert metrics.num_accepted_tokens_per_pos == (3, 1, 1)
    assert metrics.acceptance_rate_per_pos == (3 / 4, 1 / 2, 1 / 2)


# --- times ----------------------------------------------------------------------------------------

SLEEP = 0.1  # far above what a busy machine takes for a tiny round


@dataclass(frozen=True)
class SlowDrafter:
    """Takes its time on the device to draft nonsense."""

    aux_layers: tuple[int, ...] = ()

    def init_state(self, num_slots, num_pages, page_size, dtype):
        return None

    def draft(self, target, params, state, context, k):
        def nap(tokens):
            time.sleep(SLEEP)
            return tokens

        tokens = jnp.zeros((context.slots.shape[0], k), jnp.int32)
        if k:
            tokens = jax.pure_callback(nap, tokens, tokens)
        return Draft(tokens, None), state

    def observe(self, target, params, state, slots, rows, following, features, last):
        return state


@pytest.fixture(scope="module")
def slow_engine(llm):
    config = EngineConfig(max_model_len=MAX_LEN, num_pages=64, max_num_seqs=2)
    params = Params(llm.engine.params.target, None)
    return Engine(config, llm.target, SlowDrafter(), params, StaticPolicy(2))


def requests_of(num_tokens, count=2, first=0):
    params = SamplingParams(temperature=0)
    return [Request(first + i, (1 + i, 2, 3), params, num_tokens, (i,)) for i in range(count)]


def serve(engine, requests):
    samples = [sample for request in requests for sample in engine.add(request)]
    while engine.has_work:
        engine.step()
    return [sample.output for sample in samples]


def test_a_time_belongs_to_its_own_round(slow_engine):
    """With a step in flight, results come while the next one runs; K changes every step."""
    ks = iter([0, 2] * 100)
    watched = Recording((0, 2), lambda load: next(ks))
    slow_engine.set_policy(watched)
    serve(slow_engine, requests_of(40))
    times = {k: [r.ms for r in watched.rounds[2:] if r.k == k and r.ms] for k in (0, 2)}
    assert min(len(found) for found in times.values()) >= 5
    assert median(times[2]) >= 1e3 * SLEEP > 1.5 * median(times[0])


def test_chunks_are_timed_beside_the_rounds(slow_engine):
    """A round that came with chunks of another's prompt says what they took; others say nothing."""
    watched = Recording((2,), lambda load: 2)
    slow_engine.set_policy(watched)
    first, second = requests_of(30, 2)
    slow_engine.add(first)
    for _ in range(8):
        slow_engine.step()
    alone = len(watched.rounds)
    assert alone > 2 and not any(outcome.other_ms for outcome in watched.rounds[2:])
    serve(slow_engine, [second])
    others = [outcome.other_ms for outcome in watched.rounds[alone:]]
    assert 1 <= sum(ms > 0 for ms in others) <= 3


def test_times_with_a_compilation_in_them_mean_nothing(slow_engine):
    """Sampling parameters that were not asked for before have their steps compiled late: with the
    second request's, while a round of the first is on its way."""
    watched = Recording((2,), lambda load: 2)
    slow_engine.set_policy(watched)
    serve(slow_engine, requests_of(12))
    # The first come after a prompt's chunk, which the host may have read late.
    assert all(outcome.ms for outcome in watched.rounds[2:])
    watched.rounds.clear()
    params = SamplingParams(temperature=0, repetition_penalty=1.2)
    slow_engine.add(requests_of(12, 1)[0])
    for _ in range(5):
        slow_engine.step()
    assert watched.rounds and watched.rounds[-1].ms
    num_before = len(watched.rounds)
    serve(slow_engine, [Request(9, (1, 2, 3), params, 12, (0,))])
    times = [outcome.ms for outcome in watched.rounds[num_before:]]
    assert 1 <= times.count(None) <= 3 and times[-1] is not None


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


# --- switching ------------------------------------------------------------------------------------


def test_k_rises_as_a_batch_drains(llm, work):
    """A long tail: many together are better off without drafts, by this cost, and few with."""
    prompts, _, _ = work
    points = {1: {0: 1.0, 3: 1.0}, 2: {0: 1.0, 3: 1.2}, 4: {0: 1.0, 3: 9.0}}
    cost = StepCost(points, ks=(0, 1, 3), batches=(1, 2, 4))
    policy = GoodputPolicy(
        (0, 1, 3),
        cost,
        Acceptance(MOST, [0.8, 0.7, 0.6]),
        learns_cost=False,
        learns_acceptance=False,
    )
    watched = Recording(policy.choices, policy.choose)
    llm.engine.set_policy(watched)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (10, 20, 40, 80)]
    generate(llm, prompts[:4], params)
    chosen = [
        (load.num_sequences, policy.choose(load))
        for load in watched.loads
        if load.num_sequences and min(limit for _, limit in load.members) == MOST
    ]
    by_size = {n: {k for size, k in chosen if size == n} for n in (4, 3, 2, 1)}
    assert by_size == {4: {0}, 3: {0}, 2: {3}, 1: {3}}


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


def test_replicas_in_lock_step_run_the_same_k(target, head, work):
    """Two engines with different requests: one of them decides, one runs dry before the other."""
    prompts, params, expected = work
    shared, barrier = {}, Barrier(2, timeout=60)
    settings = {"num_speculative_tokens": MOST}
    cost = StepCost({1: {0: 1.0, 3: 1.3}, 4: {0: 1.0, 3: 3.0}}, ks=range(4))
    with make_llm(target, head, **settings) as one, make_llm(target, head, **settings) as other:
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
