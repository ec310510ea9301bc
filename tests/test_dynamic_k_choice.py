"""Dynamic K on the host: which K is chosen, and which outcomes a policy observes.

The device and its times are simulated. Slow tests time rounds on a real device.
"""

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilations import QUICK
from support.dynamic_k import Recording, requests_of, write_profile
from support.engines import VOCAB, generate_tokens, random_prompts
from support.engines import make_llm as make_any_llm
from support.logits import double
from support.refusals import refusal
from support.shared_models import EOS, eagle3, llama
from support.simulated_device import SimulatedPrograms
from support.simulated_outputs import HostArray

from specjax import SamplingParams
from specjax.config import EngineConfig
from specjax.device.drafters.drafter import NoDrafter, Params, Stateless
from specjax.device.verification import Draft
from specjax.engine.compiled import CompiledPrograms
from specjax.engine.engine import Engine
from specjax.engine.metrics import Compilations, Recorder
from specjax.engine.programs import Begin, Decode
from specjax.engine.tracing import Program
from specjax.host.plans import DecodePlan
from specjax.host.request import Request
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import RowOutput, Sequence
from specjax.host.speculation.acceptance import Acceptance, DraftOutcome
from specjax.host.speculation.policy import GoodputPolicy, Round, StaticPolicy, TablePolicy
from specjax.host.speculation.profile import Profile
from specjax.host.speculation.step_cost import StepCost
from specjax.serving.dynamic_k import fingerprint

pytestmark = pytest.mark.usefixtures("simulated_device")

K = 3


@pytest.fixture(scope="module")
def folder(checkpoints):
    return llama(checkpoints).folder


@pytest.fixture(scope="module")
def head(checkpoints):
    return eagle3(checkpoints).folder


def make_llm(folder, head, **speculation):
    """Return an LLM with the batch sizes of the profile. The profile may also set K."""
    speculation = {"num_speculative_tokens": None} | speculation
    batches = (1, 2, 4)
    return make_any_llm(folder, "eagle3", head, speculation=speculation, decode_batches=batches)


@pytest.fixture(scope="module")
def llm(simulated_device, folder, head):
    with make_llm(folder, head, adaptive=True, num_speculative_tokens=K) as made:
        yield made


# --- profiles, and tables -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["profile", "table"])
def test_what_is_given_is_followed(tmp_path, folder, head, llm, kind):
    """With the profile, 1 request has K = 3, and 3 or 4 requests have K = 0."""
    prompts = random_prompts(3, 20, 7, 40, 1, 12, 33, 9, vocab_size=EOS)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12 + 5 * i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    table = [[1, 1, 3], [2, 2, 1], [4, 9, 0]]
    speculation, by_size = {
        "profile": ({"dynamic_config_path": write_profile(tmp_path)}, {1: {3}, 3: {0}, 4: {0}}),
        "table": (
            {"num_speculative_tokens_per_batch_size": table, "num_speculative_tokens": K},
            {1: {3}, 2: {1}, 3: {1}, 4: {0}},
        ),
    }[kind]
    with make_llm(folder, head, **speculation) as other:
        policy = other.engine.scheduler.policy
        watched = Recording(policy.choices, policy.choose)
        other.engine.set_policy(watched)
        assert generate_tokens(other, prompts, params) == generate_tokens(llm, prompts, params)
    if kind == "table":
        assert policy == TablePolicy(((1, 1, 3), (2, 2, 1), (4, 9, 0)))
    # The last drafts of an output are of no use: then fewer are as good.
    loads = [load for load in watched.loads if load.num_sequences]
    long = [load for load in loads if min(load.requests.limits) == K]
    for size, ks in by_size.items():
        assert {policy.choose(load) for load in long if load.num_sequences == size} == ks
        assert max(policy.choose(load) for load in loads if load.num_sequences == size) == max(ks)
    assert {outcome.k for outcome in watched.rounds} >= set.union(*by_size.values())


def test_a_profile_is_of_a_model_and_a_device(tmp_path, checkpoints, folder, head, llm):
    """Without `dynamic_config_force`, another model is refused, and another device is warned of."""
    own = fingerprint(llm.target, llm.engine.drafter, llm.engine.params)
    path = write_profile(tmp_path, measured={"model": own})
    make_llm(folder, head, dynamic_config_path=path).close()
    other = llama(checkpoints, seed=5).folder
    with pytest.raises(ValueError, match="measured on another model.*dynamic_config_force=True"):
        make_llm(other, head, dynamic_config_path=path)
    make_llm(other, head, dynamic_config_path=path, dynamic_config_force=True).close()
    write_profile(tmp_path, measured={"device": "abacus"})
    with pytest.warns(UserWarning, match="measured on 'abacus'.*save_dynamic_config"):
        make_llm(folder, head, dynamic_config_path=path, adaptive=True).close()
    make_llm(folder, head, dynamic_config_path=path, dynamic_config_force=True).close()


def test_what_replicas_learned_is_averaged_by_their_rounds(tmp_path, folder, head):
    path, sizes = tmp_path / "learned.json", {"decode_batches": (1, 4), "data_parallel_size": 2}
    speculation = {"adaptive": True, "num_speculative_tokens": 1}
    with make_any_llm(folder, "eagle3", head, speculation=speculation, **sizes) as llm:
        for engine, ms, rate in zip(llm.engine.engines, (10.0, 30.0), (0.5, 0.9), strict=True):
            cost = {batch: {0: ms / 2, 1: batch * ms} for batch in (1, 4)}
            policy = GoodputPolicy((0, 1), StepCost(cost), Acceptance(1, [rate]))
            engine.scheduler.policy = policy
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (40, 10)]
        generate_tokens(llm, random_prompts(8, 8, vocab_size=VOCAB), params)
        means = [one.scheduler.policy.learned() for one in llm.engine.engines]
        rounds = [one.metrics().num_decode_steps for one in llm.engine.engines]
        llm.save_dynamic_config(path)
    saved, (first, second) = Profile.read(path), means
    assert 0 < rounds[1] != rounds[0]
    for batch, k in product((1, 4), (0, 1)):
        times = [one.step_ms[batch][k] for one in means]
        assert saved.step_ms[batch][k] == pytest.approx(np.average(times, weights=rounds))
    rates = np.average([first.rates, second.rates], axis=0, weights=rounds)
    assert saved.rates == pytest.approx(rates) and first.rates != second.rates


def test_what_was_learned_is_where_a_later_engine_begins(tmp_path, folder, head, llm):
    """The later engine starts with the saved times and rates, without replays, and learns on."""
    path = tmp_path / "learned.json"
    learned = GoodputPolicy(range(K + 1), None, Acceptance(K))
    llm.engine.set_policy(learned)
    for _ in range(200):
        verdicts = {DraftOutcome(K, K): 3, DraftOutcome(K, 0): 1}
        learned.observe(Round(4, K, 0, verdicts, 40.0))
    llm.save_dynamic_config(path)
    with make_llm(folder, head, adaptive=True, dynamic_config_path=path) as later:
        policy = later.engine.scheduler.policy
        assert policy.choices == learned.choices and policy.is_learning
        for batch, k in product((1, 2, 4), policy.choices):
            assert policy.cost.ms(batch, k) == pytest.approx(learned.cost.ms(batch, k))
        assert policy.cost.ms(4, K) == pytest.approx(40.0, rel=0.05)
        rates = policy.acceptance.rates()
        assert rates == pytest.approx(learned.acceptance.rates(), abs=0.02)
        assert rates[-1] == pytest.approx(0.75, abs=0.05)
        for _ in range(40):
            policy.observe(Round(4, K, 0, {}, 80.0))
        assert policy.cost.ms(4, K) == pytest.approx(80.0, rel=0.05)


def test_only_what_was_learned_can_be_saved(tmp_path, llm):
    llm.engine.set_policy(StaticPolicy(K))
    with pytest.raises(ValueError, match="no learned times.*adaptive"):
        llm.save_dynamic_config(tmp_path / "learned.json")
    llm.engine.set_policy(GoodputPolicy(range(K + 1), None, Acceptance(K)))
    with pytest.raises(ValueError, match="existing folder"):
        llm.save_dynamic_config(tmp_path / "none" / "learned.json")
    refusal(lambda: llm.save_dynamic_config(None), "path=None", "name a file")
    cost = StepCost({1: {0: 1e10, K: 1e10}})
    llm.engine.set_policy(GoodputPolicy(range(K + 1), cost, Acceptance(K)))
    with pytest.raises(ValueError, match=r'what was learned: batch_stats\["1"\]\["0"\]='):
        llm.save_dynamic_config(tmp_path / "learned.json")
    assert not list(tmp_path.iterdir())


def test_a_profile_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path, folder):
    given = {"dynamic_config_path": write_profile(tmp_path), "num_speculative_tokens": 4}
    with pytest.raises(ValueError, match="num_speculative_tokens=4 exceeds.*=3 of .*profile.json"):
        make_llm(folder, "no/such/folder", **given)


def test_rates_are_of_drafts_that_could_have_stood():
    """Drafts that a round does not have, and requests without drafts, do not count."""
    recorder, requests = Recorder(), requests_of(9, 2)
    short, long = (Sequence.of(request, 0, 0) for request in requests)
    long.token_ids *= 1500
    for k, kept in (3, 2), (1, 2), (1, 1), (3, 4):
        rows = [RowOutput(list(range(kept)), k)]
        recorder.record_part(DecodePlan((short,), 1, k, k), rows, [kept])
    recorder.record_part(DecodePlan((long,), 1, 2, 2), [RowOutput([1], 2)], [1])
    rest = DecodePlan((short, long), 2, 0, 0, is_rest=True)
    recorder.record_part(rest, [RowOutput([1])] * 2, [1, 1])
    config = EngineConfig(max_model_len=16, num_pages=1)
    metrics = recorder.snapshot(Scheduler(config, StaticPolicy(0)), Compilations(0, 0, 0, 0.0))
    assert metrics.num_accepted_tokens_per_pos == (3, 1, 1)
    assert metrics.acceptance_rate_per_pos == (3 / 5, 1 / 3, 1 / 2)
    assert metrics.k_histogram == {1: 2, 2: 1, 3: 2} and metrics.num_decode_steps == 5
    assert metrics.request_k_histogram == {0: 2, 1: 2, 2: 1, 3: 2}
    assert metrics.drafts_per_context == {0: 4, 4096: 1}
    assert metrics.accepted_tokens_per_context == {0: 5, 4096: 0}


# --- times ----------------------------------------------------------------------------------------

SLEEP = 0.2  # far above what a busy machine takes for a tiny round


@dataclass
class Clock:
    """A clock that advances when something sleeps, and hardly at other times."""

    seconds: float = 1.0

    def __call__(self):
        self.seconds += 1e-5
        return self.seconds

    def sleep_until(self, end):
        self.seconds = max(self.seconds, end)


@dataclass
class LateArray(HostArray):
    """Outputs that are ready at a given time."""

    clock: Clock = field(default_factory=Clock)
    done: float = 0.0  # seconds

    def is_ready(self):
        return self.clock() >= self.done

    def __array__(self, *arguments, **options):
        self.clock.sleep_until(self.done)
        return super().__array__(*arguments, **options)


class TimedPrograms(SimulatedPrograms):
    """A simulated device that runs one program at a time, with slow rounds if they have drafts."""

    free_at = 0.0
    runs_at_once = False  # long programs run while they are launched, as at times on a CPU

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.clock = Clock()

    @property
    def compilations(self):
        found = super().compilations
        return found._replace(seconds=float(found.num_late))

    def run(self, program: Program, *arguments):
        result = super().run(program, *arguments)
        if not isinstance(program, Begin | Decode):
            return result
        seconds = SLEEP if isinstance(program, Decode) and program.k else 0.01
        self.free_at = max(self.free_at, self.clock()) + seconds
        if self.runs_at_once and seconds == SLEEP:
            self.clock.sleep_until(self.free_at)
        return LateArray(result.array, clock=self.clock, done=self.free_at)


@dataclass(frozen=True)
class SlowDrafter(Stateless):
    """A drafter that sleeps on the device, and drafts the token 0."""

    def draft(self, target, params, state, context, k):
        def nap(tokens):
            time.sleep(SLEEP)
            return tokens

        tokens = jnp.zeros((context.slots.shape[0], k), jnp.int32)
        if k:
            tokens = jax.pure_callback(nap, tokens, tokens)
        return Draft(tokens, None), state


REAL = pytest.param("real", marks=pytest.mark.nightly)


@pytest.fixture(scope="module", params=["simulated", REAL])
def slow_device(request, llm):
    """An engine on a slow device."""
    config = replace(llm.engine.config, max_num_seqs=2, decode_batches=(2,))
    params = Params(llm.engine.params.target, None)
    if request.param == "real":
        parts = config, llm.target, SlowDrafter(), params, StaticPolicy(2)
        real = partial(CompiledPrograms, toolchain=QUICK)  # `llm` has a simulated device
        return Engine(*parts, make_programs=real)
    make = partial(TimedPrograms, tally=Counter())
    engine = Engine(config, llm.target, NoDrafter(), params, StaticPolicy(2), make_programs=make)
    engine.programs.runs_at_once = request.param == "simulated_at_once"
    return engine


@pytest.fixture
def slow_engine(slow_device, monkeypatch):
    if isinstance(slow_device.programs, TimedPrograms):
        monkeypatch.setattr(time, "perf_counter", slow_device.programs.clock)
    return slow_device


def serve(engine, requests):
    samples = [sample for request in requests for sample in engine.add(request)]
    while engine.has_work:
        engine.step()
    return [sample.output for sample in samples]


@pytest.mark.parametrize("slow_device", ["simulated", "simulated_at_once", REAL], indirect=True)
def test_a_time_belongs_to_its_own_round(slow_engine):
    """K changes in every step, and results are read while the next round runs."""
    ks = iter([0, 2] * 100)
    watched = Recording((0, 2), lambda load: next(ks))
    slow_engine.set_policy(watched)
    serve(slow_engine, requests_of(40))
    times = {k: [r.ms for r in watched.rounds[2:] if r.k == k and r.ms] for k in (0, 2)}
    assert min(len(found) for found in times.values()) >= 5
    # A round seems shorter by what the result before it was read late.
    assert median(times[2]) >= 0.95e3 * SLEEP > 1.5 * median(times[0])


def test_chunks_are_no_part_of_a_round(slow_engine):
    """Prompts take the same time for every K, so the time of a round must not include them."""
    watched = Recording((2,), lambda load: 2)
    slow_engine.set_policy(watched)
    first, second = requests_of(30, 2)
    slow_engine.add(first)
    for _ in range(8):
        slow_engine.step()
    alone = len(watched.rounds)
    serve(slow_engine, [second])
    assert alone > 2 and max(one.ms or 0 for one in watched.rounds[alone:]) < 1.5e3 * SLEEP


def test_timing_another_shape_is_no_part_of_a_round(slow_engine):
    """The timing affects neither the round in flight nor the round that is launched next."""
    watched, timed = Recording((2,), lambda load: 2), []
    watched.shape_ready = lambda batch, k, time: timed.append(time())
    slow_engine.set_policy(watched)
    (request,) = requests_of(12, 1)
    slow_engine.add(request)
    for _ in range(4):
        slow_engine.step()
    slow_engine._timed.clear()
    serve(slow_engine, [])
    assert timed == [pytest.approx(1e3 * SLEEP, rel=0.2)]
    times = [outcome.ms for outcome in watched.rounds]
    assert len(times) > 4 and sum(ms is None for ms in times) <= 2
    assert max(filter(None, times)) < 1.5e3 * SLEEP


def test_times_with_a_compilation_in_them_mean_nothing(slow_engine):
    """A request with a new logits processor makes programs compile while rounds run."""
    watched = Recording((2,), lambda load: 2)
    slow_engine.set_policy(watched)
    serve(slow_engine, requests_of(12))
    # The first come after a prompt's chunk, which the host may have read late.
    assert all(outcome.ms for outcome in watched.rounds[2:])
    watched.rounds.clear()

    params = SamplingParams(temperature=0, logits_processors=[double])
    processor = slow_engine.repertoire.number_of((double,))
    slow_engine.add(requests_of(12, 1)[0])
    for _ in range(5):
        slow_engine.step()
    assert watched.rounds and watched.rounds[-1].ms
    num_before = len(watched.rounds)
    serve(slow_engine, [Request(9, (1, 2, 3), params, 12, (0,), processor=processor)])
    times = [outcome.ms for outcome in watched.rounds[num_before:]]
    # While they are compiled, rounds go on; what those take is not theirs alone.
    assert None in times[:3] and times[-1] is not None
