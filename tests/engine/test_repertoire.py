"""Which programs an engine runs while others still compile, on a slow simulated device."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.logits import double
from support.simulated_device import SimulatedPrograms
from support.tiny import AnyText

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import NoDrafter
from specjax.engine.engine import Engine
from specjax.engine.programs import (
    Decode,
    Extend,
    Prefill,
    ProcessFirst,
    ProcessRound,
    Propose,
    Settle,
)
from specjax.host.request import Request
from specjax.host.speculation.acceptance import Acceptance
from specjax.host.speculation.policy import GoodputPolicy, StaticPolicy
from specjax.sampling_params import SamplingParams

K = 2
NOTHING: Any = None


def make_engine(policy=None, *, is_slow=True, **settings):
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 16}
    target: Any = SimpleNamespace(vocab_size=31, cache_kinds=())
    parts = EngineConfig(**sizes | settings), target, NoDrafter(), NOTHING
    engine = Engine(*parts, policy or StaticPolicy(K), make_programs=SimulatedPrograms)
    engine.programs.is_slow = is_slow
    return engine


@pytest.fixture
def engine():
    return make_engine()


def add(engine, number, max_tokens=10, **params):
    grammar = AnyText if "structured_outputs" in params else None
    asked = SamplingParams(temperature=0, **params)
    processor = engine.repertoire.number_of(tuple(asked.logits_processors or ()))
    own = {"processor": processor, "follow_grammar": grammar}
    (sample,) = engine.add(Request(number, (1, 2, number), asked, max_tokens, (0,), **own))
    return sample


def run(engine):
    launches: list[Any] = []
    launch = engine.programs.run

    def noting(key, *arguments):
        launches.append(key)
        return launch(key, *arguments)

    engine.programs.run = noting
    while engine.has_work:
        engine.step()
    del engine.programs.run
    return launches


GRAMMAR = {"structured_outputs": {"regex": "a"}}


# --- shapes ---------------------------------------------------------------------------------------


def test_it_begins_with_one_shape_of_each_part(engine):
    kinds = {(type(key), key.batch) for key in engine.programs.ready}
    assert kinds >= {(Prefill, 2), (Propose, 4), (Extend, 4), (Settle, 4)}
    assert {key.k for key in engine.programs.ready if isinstance(key, Extend)} == {K}
    assert not any(isinstance(key, Decode) for key in engine.programs.ready)


def test_all_are_there_if_they_are_compiled_ahead():
    engine = make_engine(compile_ahead=True)
    shapes = {(k.batch, k.k) for k in engine.programs.ready if isinstance(k, Decode)}
    assert shapes == {(1, K), (2, K), (4, K)}
    assert engine.scheduler.shapes is engine.scheduler.all_shapes


def test_shapes_that_were_not_compiled_ahead_are_told(monkeypatch):
    """For example, a process may have no memory maps left."""
    compile_first = SimulatedPrograms.compile_ahead

    def only_first(self, programs, then=(), *, show_progress):
        compile_first(self, programs, show_progress=show_progress)

    monkeypatch.setattr(SimulatedPrograms, "compile_ahead", only_first)
    with pytest.warns(UserWarning, match=r"compile_ahead: \d+ of \d+ programs were not compiled"):
        make_engine(compile_ahead=True)


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_step_runs_in_what_there_is_and_then_in_its_own_shape(is_slow):
    expected = add(other := make_engine(compile_ahead=True), 0, 40)
    run(other)
    engine = make_engine(is_slow=is_slow)
    engine.repertoire.patience_ms = 0.0
    sample = add(engine, 0, 40)
    launches = run(engine)
    assert sample.output == expected.output, "padding changes no token"
    rounds = [(key.batch, type(key)) for key in launches if isinstance(key, Decode | Settle)]
    assert rounds[0] == (4, Settle) and rounds[-1] == (1, Decode)
    assert engine.metrics().num_compiles_after_warmup == 0, "nobody waited"


def test_a_shape_is_asked_for_when_the_lack_of_it_has_cost_enough(engine):
    engine.repertoire.patience_ms = 1e9
    add(engine, 0, 40)
    run(engine)
    assert not engine.programs.pending
    engine.repertoire._lost_ms.clear()
    engine.repertoire.patience_ms = 40.0
    time, spent = engine.clock.time, []
    engine.clock.time = lambda step, seconds: spent.append(10.0) or 10.0
    add(engine, 1, 40)
    while not engine.programs.pending:
        engine.step()
    engine.clock.time = time
    # Of 12 rows, 3 are used: 7.5 of 10 ms are lost, and the chunk's before.
    assert 6 <= len(spent) <= 8
    assert engine.programs.pending[-1] == Decode(1, K, engine.repertoire.variants[0])


def test_a_shape_with_as_much_padding_is_asked_for_if_it_prefills_more_prompts():
    engine = make_engine(max_num_seqs=8, prefill_shapes=((1, 64), (8, 8)))
    engine.repertoire.patience_ms = 25.0
    engine.clock.time = lambda step, seconds: 10.0
    samples = [add(engine, number, 1) for number in range(8)]
    while engine.has_work and Prefill(8, 8) not in engine.programs.pending:
        engine.step()
    # 3 of 24 tokens ran instead of all, 3 of 21, 3 of 18: 8.75, 8.57 and 8.33 of 10 ms were lost.
    assert sum(sample.is_finished for sample in samples) == 3


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_program_on_disk_is_read_once_it_would_have_saved_the_time_of_reading(engine, is_on_disk):
    (needed,) = needs = [Decode(1, K, engine.repertoire.variants[0])]
    engine.programs.on_disk = set(needs * is_on_disk)
    for lost in range(31):
        assert engine.programs.pending == needs * (lost * 100 >= (100 if is_on_disk else 3000))
        engine.repertoire._add_loss(needs, 100.0)


def test_an_engine_settles_with_the_fewest_programs_that_leave_little_to_gain(engine):
    plain = engine.repertoire.variants[0]
    lost = {Decode(batch, k, plain): 1.0 + batch * k for batch in (1, 2, 4) for k in (0, 1)}
    for program, milliseconds in lost.items():
        engine.repertoire._add_loss([program], milliseconds)
    engine.repertoire.settle(4.0)
    left = [lost[one] for one in lost if one not in engine.programs.pending]
    asked = [lost[one] for one in engine.programs.pending]
    assert sum(left) <= 4.0 < sum(left) + min(asked) and max(left) <= min(asked)
    num_asked = len(asked)
    engine.repertoire.settle(0.0)
    assert len(engine.programs.pending) == num_asked, "what was lost before counts once"


def test_what_does_not_compile_is_done_without(engine):
    engine.repertoire.patience_ms = 0.0
    plain = engine.repertoire.variants[0]
    engine.programs.failures[Decode(1, K, plain)] = RuntimeError("too large")
    sample = add(engine, 0, 40)
    launches = run(engine)
    assert len(sample.output) == 40 and sample.error is None
    assert not any(isinstance(key, Decode) and key.batch == 1 for key in launches)


# --- variants -------------------------------------------------------------------------------------


def test_who_needs_another_variant_waits_and_nobody_else_does(engine):
    first = add(engine, 0, 30)
    engine.step()
    asking = add(engine, 1, 5, logits_processors=[double])
    second = add(engine, 2, 5)
    engine.programs.pace = 0.0
    while not second.is_finished:
        engine.step()
        assert not asking.output and engine.metrics().num_requests_waiting > 0
    assert first.output and engine.programs.pending
    launches = run(engine)
    assert len(asking.output) == 5 and len(first.output) == 30
    assert {ProcessFirst, ProcessRound} <= {type(key) for key in launches}
    # What comes before and after them is there.
    assert engine.metrics().num_compiles_after_warmup == 2


def test_a_grammar_needs_no_program_of_its_own(engine):
    """Masks are inputs of the separate programs of a round, with which an engine starts."""
    first = add(engine, 0, 30)
    engine.programs.pace = 0.0
    engine.step()
    asking = add(engine, 1, 5, **GRAMMAR)
    launches = run(engine)
    assert len(asking.output) == 5 and len(first.output) == 30
    assert Settle in {type(key) for key in launches}
    assert engine.metrics().num_compiles_after_warmup == 0


def test_plain_requests_need_no_conditionals(monkeypatch):
    """Plain steps have a separate variant. No request waits when other requests come or end."""
    monkeypatch.setattr(SimulatedPrograms, "waits_at_conditionals", True)
    engine = make_engine(is_slow=False, compile_ahead=True)
    asked = {}, {"logprobs": 2}, {"repetition_penalty": 1.5}
    for number, params in enumerate(asked):
        alone = add(engine, number, 5, **params)
        variants = {key.variant for key in run(engine) if isinstance(key, Decode)}
        assert {one.is_plain for one in variants} == {not params} and len(alone.output) == 5
    samples = [add(engine, 3 + i, 4 + 4 * i, **asked[1 - i]) for i in range(2)]
    plain = [key.variant.is_plain for key in run(engine) if isinstance(key, Decode)]
    assert not plain[0] and plain[-1]
    assert [len(sample.output) for sample in samples] == [4, 8]
    assert engine.metrics().num_compiles_after_warmup == 0


def test_drafts_are_made_plainly_until_their_own_program_is_there(engine):
    engine.programs.pace = 0.0
    for number, processors in enumerate(((), ((0, (double,)),))):
        sample = add(engine, number, 9, logits_processors=[double])
        launches = run(engine)
        assert len(sample.output) == 9
        made_by = {key.variant.processors for key in launches if isinstance(key, Propose)}
        assert made_by == {processors}
        engine.programs.finish(show_progress=False)


def test_requests_of_two_variants_run_together(engine):
    samples = [add(engine, 0, 20, **GRAMMAR), add(engine, 1, 20, logits_processors=[double])]
    run(engine)
    assert [len(sample.output) for sample in samples] == [20, 20]
    # What is left of a company needs no program of its own.
    engine.programs.finish(show_progress=False)
    before = set(engine.programs.ready)
    samples = [add(engine, 2, 4, **GRAMMAR), add(engine, 3, 30, logits_processors=[double])]
    run(engine)
    assert set(engine.programs.ready) == before


def test_a_variant_that_does_not_compile_is_its_own_requests_fault(engine):
    engine.repertoire.number_of((double,))
    assert Prefill(2, 32) in engine.programs.ready
    failing = ProcessFirst(2, ((0, (double,)),))
    engine.programs.failures[failing] = RuntimeError("no such operation")
    good = add(engine, 0, 20)
    bad = add(engine, 1, 20, logits_processors=[double])
    run(engine)
    assert bad.finish_reason == "error" and "no such operation" in str(bad.error)
    assert len(good.output) == 20
    assert engine.metrics().requests_finished == {"error": 1, "length": 1}
    engine.programs.failures.clear()
    again = add(engine, 2, 5, logits_processors=[double])
    for _ in range(50):
        engine.step()
    assert len(again.output) == 5, "it is compiled once more"


def test_those_that_wait_for_programs_can_be_aborted_and_dropped(engine):
    sample = add(engine, 0, **GRAMMAR)
    engine.step()
    assert engine.abort(0) == [sample] and not engine.has_work
    sample = add(engine, 0, **GRAMMAR)
    engine.step()
    engine.reset()
    assert sample.finish_reason == "abort" and not engine.has_work
    assert not engine.scheduler.demands
    sample = add(engine, 0, 5, **GRAMMAR)
    run(engine)
    assert len(sample.output) == 5 and not engine.scheduler.demands


# --- policies that learn --------------------------------------------------------------------------


def test_a_policy_is_told_the_time_of_each_round_once_when_it_can_be_run():
    policy = GoodputPolicy((0, 1, K), None, Acceptance(K))
    told: list[tuple[int, int]] = []
    ready = policy.shape_ready
    policy.shape_ready = lambda batch, k, time: (told.append((batch, k)), ready(batch, k, time))
    engine = make_engine(policy, is_slow=False)
    engine.repertoire.patience_ms = 0.0
    sample = add(engine, 0, 40)
    assert told == [(4, 0)], "how times grow with K is asked for at once"
    run(engine)
    assert len(sample.output) == 40
    assert len(set(told)) == len(told) and (4, K) not in told, "that was known from the beginning"
    assert {shape for shape in told if shape[0] == 1}


def test_nothing_is_timed_while_something_is_compiled():
    policy = GoodputPolicy((0, 1, K), None, Acceptance(K))
    engine = make_engine(policy)
    engine.programs.pending = [Decode(4, 1, engine.repertoire.variants[0])]
    engine._timed.discard((4, 0))
    told: list[tuple[int, int]] = []
    policy.shape_ready = lambda batch, k, time: told.append((batch, k))
    engine._look()
    assert not told
    engine.programs.finish(show_progress=False)
    start = time.perf_counter()
    engine._look()
    assert sorted(told) == [(4, 0), (4, 1)]
    assert engine.clock.start >= start, "no part that was launched before is timed"


def test_no_round_is_timed_from_before_its_step_began(engine):
    add(engine, 0)
    for _ in range(3):
        start = time.perf_counter()
        engine.step()
        assert [step.start >= start for step in engine._in_flight] == [True]


def test_a_policy_that_cannot_begin_changes_nothing():
    engine = make_engine(compile_ahead=True)
    shapes = engine.scheduler.shapes
    sample = add(engine, 0, 20)
    engine.step()
    with pytest.raises(ValueError, match="requests are running"):
        engine.set_policy(GoodputPolicy((0, 1), None, Acceptance(1)))
    launches = run(engine)
    assert len(sample.output) == 20 and engine.scheduler.shapes is shapes
    assert {key.k for key in launches if isinstance(key, Decode)} == {K}
