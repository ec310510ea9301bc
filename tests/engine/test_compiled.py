"""Programs are compiled once per shape and variant, ahead of time or counted as late."""

from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

import jax
import numpy as np
import pytest
from support.compilations import count_maps
from support.engines import programs_with
from support.logits import double, halve
from support.simulated_device import SimulatedPrograms
from support.tiny import AnyText, tiny_llama

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import NoDrafter, Params, Variant
from specjax.device.extras import Extras
from specjax.device.verification import SeedExact
from specjax.device.weights import matrix
from specjax.engine import launcher
from specjax.engine.batch import extras_of, pack
from specjax.engine.engine import Engine
from specjax.engine.programs import Admit, Begin, Decode, Prefill
from specjax.host.plans import DecodePlan, PrefillPlan
from specjax.host.request import Request
from specjax.host.speculation.policy import StaticPolicy
from specjax.sampling_params import SamplingParams

pytestmark = [pytest.mark.every_jax, pytest.mark.slow]

PLAIN = Variant()
EVERY = Variant(num_logprobs=20)  # what every engine compiles
# A round and a chunk have one shape each.
SIZES = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "compile_ahead": True,
    "max_num_batched_tokens": 64,
    "num_pages": 8,
    "decode_batches": (2,),
    "prefill_shapes": ((2, 32),),
}
TWO_SHAPES = {"decode_batches": (1, 2), "prefill_shapes": ((1, 16), (2, 32))}
SHAPES = [(1, 1), (30, 5), (33, 20), (20, 9), (63, 1), (2, 62)]  # of prompt and output
GRAMMAR = {"structured_outputs": {"regex": "a"}}


def make_engine(*, make_programs=None, intermediate_size=16, **settings):
    target, rng = tiny_llama(intermediate_size), np.random.default_rng(0)
    weights = jax.tree.map(
        lambda spec: rng.normal(size=spec.shape).astype(np.float32), target.specs()
    )
    params, policy = Params(jax.device_put(weights), None), StaticPolicy(0)
    config = EngineConfig(**(SIZES | settings))
    return Engine(config, target, NoDrafter(), params, policy, make_programs=make_programs)


@pytest.fixture(scope="module")
def engine():
    return make_engine(**TWO_SHAPES)


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.slow)])
def make_any_engine(request):
    """Return a function that makes engines on the real device, or on the simulated device."""
    make = None if request.param == "real" else SimulatedPrograms
    return partial(make_engine, make_programs=make)


def make_requests(engine, *kinds):
    """Return requests of various sizes, which have the parameters `kinds` in turn."""
    requests = []
    for i, (length, max_tokens) in enumerate(SHAPES):
        params = SamplingParams(**{"temperature": 0} | kinds[i % len(kinds)])
        prompt, seeds = tuple(np.arange(length) % 31), tuple(range(params.n))
        processor = engine.repertoire.number_of(params.logits_processors)
        follow = AnyText if params.structured_outputs else None
        own = {"processor": processor, "follow_grammar": follow}
        requests.append(Request(i, prompt, params, max_tokens, seeds, **own))
    return requests


def needed_by(engine, requests):
    """Return the variant that a step of these requests needs."""
    return engine.repertoire.asked_by(request.demands for request in requests)


def run_all(engine, requests):
    """Run the requests, and return the output of each request's first sample."""
    for request in requests:
        engine.add(request)
    outputs = {}
    while engine.has_work:
        outputs |= {s.request.request_id: s.output for s in engine.step() if not s.index}
    return outputs


def count_new(engine, requests):
    """Return how many programs `prepare` compiles for the requests."""
    before = engine.metrics().num_compilations
    engine.prepare(requests)
    return engine.metrics().num_compilations - before


def test_matrices_in_blocks_give_the_same_tokens(monkeypatch):
    """Which CPUs store them so depends on the vendor."""
    outputs = []
    for columns in None, 16:
        monkeypatch.setattr(matrix, "block_columns", lambda columns=columns: columns)
        engine = make_engine()
        num_given = len(jax.tree.leaves(engine.programs.params))
        assert (len(engine.programs._weights) > num_given) == (columns is not None)
        outputs.append(run_all(engine, make_requests(engine, {})))
    assert outputs[0] == outputs[1]


# --- ahead of time --------------------------------------------------------------------------------


def test_everything_a_request_needs_is_compiled_ahead(engine, compilations):
    metrics = engine.metrics()
    num_admit, num_prefill, num_begin, num_decode = 2, 2, 2, 2
    assert metrics.num_compilations == num_admit + num_prefill + num_begin + num_decode
    assert metrics.compile_seconds > 0
    with compilations.none_expected():
        requests = make_requests(engine, {})
        assert count_new(engine, requests) == 0
        outputs = run_all(engine, requests)
        engine.set_policy(StaticPolicy(0))  # for which everything is there
    assert [len(outputs[i]) for i in range(6)] == [max_tokens for _, max_tokens in SHAPES]
    after = engine.metrics()
    assert after.num_compilations == metrics.num_compilations
    assert after.num_compiles_after_warmup == 0


def test_shapes_that_are_not_given_double_up_to_the_budget(make_any_engine):
    """All default shapes are compiled."""
    engine = make_any_engine(decode_batches=None, prefill_shapes=None)
    assert engine.config.decode_batches == (1, 2)
    assert engine.config.prefill_shapes == ((1, 32), (2, 32), (1, 64))
    num_admit, num_prefill, num_begin, num_decode = 2, 3, 3, 2
    run_all(engine, make_requests(engine, {}))
    assert engine.metrics().num_compilations == num_admit + num_prefill + num_begin + num_decode
    assert engine.metrics().num_compiles_after_warmup == 0


def test_samples_ends_and_draws_need_nothing_of_their_own(engine, compilations):
    kinds = {"n": 3}, {"stop_token_ids": [3]}, {"ignore_eos": True}, {"seed": 5}, {"temperature": 2}
    for params in kinds:
        assert needed_by(engine, make_requests(engine, params)) == EVERY
    with compilations.none_expected():
        engine.prepare(make_requests(engine, {"n": 3}))
        run_all(engine, make_requests(engine, {"n": 3}))


WANTED = {
    "edits": ({"presence_penalty": 1.0}, set()),
    "logprobs": ({"logprobs": 7}, set()),
    "prompt-logprobs": ({"prompt_logprobs": 0}, {"begin"}),
    "grammar": (GRAMMAR, {"propose", "extend", "settle"}),
}


@pytest.mark.parametrize("params, programs", WANTED.values(), ids=WANTED.keys())
def test_what_requests_ask_for_is_compiled_before_they_run(
    make_any_engine, compilations, params, programs
):
    engine = make_any_engine()
    asking = make_requests(engine, params)
    assert count_new(engine, asking) == len(programs)
    with compilations.none_expected():
        assert count_new(engine, asking) == 0
        run_all(engine, asking)
        # Those that ask for nothing run as if nobody ever had.
        run_all(engine, make_requests(engine, {}))
        run_all(engine, make_requests(engine, params, {}))
    assert engine.repertoire.variant_for(PrefillPlan((), 2, 32), []) == EVERY
    assert engine.metrics().num_compiles_after_warmup == 0


def test_mixed_requests_run_in_any_company(compilations):
    """After `prepare`, no combination of these requests in a step compiles anything."""
    engine = make_engine()
    kinds = [
        {"logprobs": 2, "prompt_logprobs": 5},
        {**GRAMMAR, "top_k": 3},
        {"logit_bias": {3: 1.0}},
        {"logits_processors": [double]},
        {},
    ]
    requests = make_requests(engine, *kinds)
    engine.prepare(requests)
    with compilations.none_expected():
        for first in range(len(requests)):
            run_all(engine, requests[first:] + requests[:first])
        for request in requests:
            run_all(engine, [request])
        run_all(engine, make_requests(engine, *kinds[2:]))
    assert engine.metrics().num_compiles_after_warmup == 0


def test_a_new_policy_is_compiled_in_every_variant(make_any_engine):
    """Later requests may have the same options as requests before the change of the policy."""
    engine = make_any_engine()
    requests = make_requests(engine, {"logprobs": 2})
    engine.prepare(requests)
    engine.set_policy(StaticPolicy(0))
    assert count_new(engine, requests) == 0


# --- variants -------------------------------------------------------------------------------------


def test_a_step_runs_the_first_variant_that_does(engine, monkeypatch):
    needed = Variant(num_logprobs=50)
    plan = PrefillPlan((), 1, 32)

    def chosen(needed, *variants):
        monkeypatch.setattr(engine.repertoire, "variants", list(variants))
        monkeypatch.setattr(engine.repertoire, "asked_by", lambda all_demands: needed)
        engine.repertoire._forget()
        return engine.repertoire.variant_for(plan, [])

    halved = ((0, (halve,)),)
    some = PLAIN, Variant(halved), Variant(halved, num_logprobs=50), needed
    assert chosen(needed) == needed, "there is none yet"
    assert chosen(PLAIN, *some) == PLAIN
    assert chosen(needed, *some) == Variant(halved, num_logprobs=50)
    assert chosen(Variant(halved), *some) == Variant(halved)
    assert chosen(Variant(masks=True), *some) == Variant(masks=True)


def test_a_step_does_what_any_of_its_requests_needs(engine):
    number = engine.repertoire.number_of((halve,))
    for kinds, needed in (
        ([{}, {}], EVERY),
        ([{"min_tokens": 1}, {"logprobs": 3}], EVERY),
        ([{"prompt_logprobs": 4}, {"logprobs": 0}], Variant((), False, 20, 20)),
        ([{"prompt_logprobs": 0}, {}], Variant((), False, 20, 0)),
        ([GRAMMAR, {"logit_bias": {1: 2.0}}], Variant((), True, 20)),
        ([{"logits_processors": [halve]}, {}], Variant(((number, (halve,)),), False, 20)),
    ):
        assert needed_by(engine, make_requests(engine, *kinds)) == needed


def test_more_logprobs_than_every_step_reports_are_a_variant(engine, monkeypatch):
    monkeypatch.setattr(engine.repertoire, "_max_logprobs", 50)
    monkeypatch.setattr(engine.repertoire, "_asked", {})
    for kind, needed in (
        ({"logprobs": 20}, EVERY),
        ({"logprobs": 21}, Variant(num_logprobs=50)),
        ({"prompt_logprobs": 1}, Variant((), False, 20, 50)),
    ):
        request = replace(make_requests(engine, {})[0], params=SamplingParams(**kind))
        assert needed_by(engine, [request]) == needed


def test_a_step_is_told_what_any_of_its_requests_asks_for(engine):
    for kinds, extras in (
        ([{}, {"temperature": 0.7}], Extras(0)),
        ([{"top_p": 0.5}], Extras(0)),  # at temperature 0 there is nothing to cut
        ([{}, {"temperature": 1.0, "top_p": 0.5}], Extras.EDITS),
        ([{"logprobs": 0}, {}], Extras.LOGPROBS),
        ([{"prompt_logprobs": 1}], Extras(0)),
        ([{"logprobs": 2}, {"bad_words": ["a"]}], Extras.EDITS | Extras.LOGPROBS),
    ):
        demands = {request.demands for request in make_requests(engine, *kinds)}
        assert extras_of(demands) == extras, kinds


# --- programs -------------------------------------------------------------------------------------


def test_a_program_is_compiled_once_and_a_late_one_is_counted(engine, compilations):
    parts = engine.target, engine.drafter, SeedExact()
    programs = Engine.make_programs(engine.config, *parts, engine.params, engine.layout, 0)

    def compile_ahead(*keys):
        """Compile programs; return the number of compiled programs, and the number of late ones."""
        programs.compile_ahead(keys, show_progress=False)
        return programs.compilations[:2]

    def launch(round_):
        """Run a round with only padding rows."""
        page_tables = engine.scheduler.residents.page_tables
        plan = DecodePlan((), round_.batch, 0, 0)
        packed = pack(plan, page_tables, engine.layout, Extras(0))
        return np.asarray(programs.run(round_, packed))

    # Of the engine's, but for the late one.
    one, late = Decode(1, 0, EVERY), Decode(2, 0, PLAIN)
    keys = Admit(2), Prefill(2, 32), Begin(2, 32, EVERY), one
    assert compile_ahead(*keys, *keys) == (4, 0)
    with compilations.none_expected():
        assert compile_ahead(*keys) == (4, 0)
    seconds, num_compiled = programs.compilations.seconds, len(compilations.names)
    outputs = launch(late)
    assert outputs.shape == (2, 5) and not outputs[:, :2].any()  # a round in which nobody was
    assert programs.compilations[:2] == (5, 1)
    assert programs.compilations.seconds > seconds
    assert compilations.names[num_compiled:] == ["jit(decode)"]
    with compilations.none_expected():
        launch(late)
        launch(one)
    # Compiling it ahead afterwards does not make up for it.
    assert compile_ahead(late) == (5, 1)


def test_what_is_compiled_behind_changes_no_token():
    """A round first runs in several padded programs, and later in one program of its shape."""
    expected = run_all(ahead := make_engine(**TWO_SHAPES), make_requests(ahead, {}))
    behind = make_engine(**TWO_SHAPES, compile_ahead=False)
    behind.repertoire.patience_ms = 0.0
    behind.repertoire.note_apart = lambda *_: None  # test_joined.py has programs for both parts
    assert not any(isinstance(key, Decode) for key in behind.programs.ready)
    for _ in range(2):  # what a round loses is not counted while a new shape becomes ready
        assert run_all(behind, make_requests(behind, {})) == expected
        behind.programs.finish(show_progress=False)
    whole = {key.batch for key in behind.programs.ready if isinstance(key, Decode)}
    assert whole == {1, 2}
    assert run_all(behind, make_requests(behind, {})) == expected
    assert run_all(behind, make_requests(behind, {}, GRAMMAR)) == expected
    assert behind.metrics().num_compiles_after_warmup == 0
    behind.close()


def test_a_request_that_nobody_prepared_for_still_runs():
    engine = make_engine()
    params, programs = WANTED["grammar"]
    plain = run_all(engine, make_requests(engine, {}))
    assert run_all(engine, make_requests(engine, params)) == plain
    assert engine.metrics().num_compiles_after_warmup == len(programs)


def test_a_closed_engine_gives_its_memory_maps_back():
    """After a second engine was closed, no more memory maps are in use than after the first."""
    make_programs, held, given_back = programs_with(jits=WeakValueDictionary()), [], []
    for _ in range(2):
        engine = make_engine(intermediate_size=40, make_programs=make_programs)
        run_all(engine, make_requests(engine, {}))
        before = count_maps()
        engine.close()
        del engine
        held.append(count_maps())
        given_back.append(before - held[-1])
    if not held[0]:
        pytest.skip("memory maps cannot be counted here")
    assert min(given_back) > 200, "eight programs have some dozens each"
    assert max(held) - held[0] < 50, held


# --- packed arrays --------------------------------------------------------------------------------


class EvenText(AnyText):
    """A matcher that permits the tokens 0, 2, 4, ..."""

    def masks(self, drafts):
        return np.full((len(drafts) + 1, 1), 0x55555555, np.int32)


def outputs_after_steps(engine):
    """After each step, yield the outputs so far. Some requests have a grammar."""
    for i, (length, max_tokens) in enumerate(SHAPES):
        params = SamplingParams(temperature=0.8, **GRAMMAR if i % 2 else {})
        prompt, follow = tuple(np.arange(length) % 31), EvenText if i % 2 else None
        engine.add(Request(i, prompt, params, max_tokens, (i,), follow_grammar=follow))
    outputs = {}
    while engine.has_work:
        for sequence in engine.step():
            outputs[sequence.request.request_id] = list(sequence.output)
        yield outputs


def test_packed_arrays_are_done_with_when_their_results_are_there(monkeypatch):
    """The host may reuse their memory then: no later step reads them."""
    engine = make_engine()
    engine.prepare(make_requests(engine, GRAMMAR))
    *_, expected = outputs_after_steps(engine)
    assert [len(expected[i]) for i in range(6)] == [max_tokens for _, max_tokens in SHAPES]
    assert all(token % 2 == 0 for i in (1, 3, 5) for token in expected[i])
    steps, kinds = [], set()

    def recording(name):
        real = getattr(launcher, name)

        def record(*arguments):
            # Aligned as XLA likes it, so that the device uses the host's memory without a copy.
            packed = real(*arguments)
            memory = np.zeros(packed.nbytes + 64, np.uint8)
            start = -memory.ctypes.data % 64
            aligned = memory[start : start + packed.nbytes].view(np.int32).reshape(packed.shape)
            aligned[:] = packed
            if name == "pack":  # comes first in a step
                steps.append([])
            steps[-1].append(aligned)
            kinds.add(name)
            return aligned

        monkeypatch.setattr(launcher, name, record)

    for name in "pack", "pack_admissions", "pack_masks":
        recording(name)
    outputs = {}
    for outputs in outputs_after_steps(engine):  # noqa: B007
        for step in steps[:-2]:  # the last two are in flight: chunks and a round
            for packed in step:
                packed[:] = 1
    assert len(steps) > 20 and len(kinds) == 3
    assert outputs == expected
