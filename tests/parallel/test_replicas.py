"""Data parallel LLMs: under all events, requests get the tokens of one engine."""

import asyncio
import gc
import threading
import time
import weakref
from collections import Counter
from contextlib import ExitStack

import jax
import numpy as np
import pytest
from support.engines import (
    SIZES,
    generate,
    make_llm,
    patched,
    random_prompts,
    simulated_engines,
    tokens_of,
)
from support.refusals import refusal
from support.simulated_outputs import HostArray
from support.texts import VOCAB, simulated_llm

from specjax import AsyncLLM, SamplingParams
from specjax.rl import RolloutEngine

PROGRAMS = "admit", "prefill", "begin", "decode", "read"
LONG = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


def cases(count=24):
    """Return prompts that share prefixes, and parameters, half of them without a seed."""
    prompts = random_prompts(*[3 + i % 21 for i in range(count)], vocab_size=VOCAB)
    params = [
        SamplingParams(
            n=1 + i % 5 // 4,
            max_tokens=4 + i % 19,
            temperature=0.8 * (i % 2),
            seed=i if i % 4 == 3 else None,
            logprobs=1 if i % 3 else None,
        )
        for i in range(count)
    ]
    return [prompts[i % 3][:9] + prompt for i, prompt in enumerate(prompts)], params


@pytest.fixture(scope="module")
def expected(letters):
    """The outputs of one engine."""
    with simulated_llm(letters, "ngram") as llm:
        return [output.outputs for output in generate(llm, *cases())]


@pytest.fixture(params=[2, 4], scope="module")
def llm(letters, request):
    with simulated_llm(letters, "ngram", data_parallel_size=request.param) as llm:
        yield llm


@pytest.fixture(autouse=True)
def same_seeds(request):
    """Number each test's requests from 0, so that they have the same derived seeds."""
    if "llm" in request.fixturenames:
        request.getfixturevalue("llm")._next_id = 0


def assert_all_idle(llm):
    assert not llm.engine.has_work and not llm.engine.unfinished_ids
    for engine in llm.engine.engines:
        scheduler = engine.scheduler
        assert not engine.has_work and scheduler.num_running == scheduler.num_unfinished == 0
        assert scheduler.pages.num_free == scheduler.pages.num_pages


def test_all_replicas_give_what_one_engine_gives(llm, expected):
    engines = llm.engine.engines
    assert len({id(engine.scheduler.policy) for engine in engines}) == len(engines)
    before = [engine.metrics().num_generation_tokens for engine in engines]
    outputs = generate(llm, *cases())
    assert [output.outputs for output in outputs] == expected
    tokens = [engine.metrics().num_generation_tokens for engine in engines]
    gained = np.subtract(tokens, before)
    assert gained.sum() == sum(map(len, tokens_of(outputs)))
    assert gained.min() > gained.sum() / len(engines) / 2  # the load is shared
    assert f"data_parallel_size={len(engines)}" in repr(llm)
    llm._next_id = 0
    last = {int(output.request_id): output for output in llm.generate_stream(*cases())}
    assert [last[i].outputs for i in range(len(expected))] == expected
    assert_all_idle(llm)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_once(llm, expected, seed, fails, caplog):
    """Requests are aborted, and devices fail, except one replica's."""
    rng, engines = np.random.default_rng(seed), llm.engine.engines
    arriving = [
        (llm.make_request(*pair), outputs)
        for pair, outputs in zip(zip(*cases(), strict=True), expected, strict=True)
    ]
    whole, ended, aborted = {}, Counter(), set()
    while arriving or llm.engine.has_work:
        for request, outputs in arriving[: rng.integers(3)]:
            whole |= zip(llm.engine.add(request), outputs, strict=True)
            del arriving[0]
        is_due = rng.random() < 0.1 or not (arriving or aborted)
        if is_due and (ids := sorted(llm.engine.unfinished_ids)):
            found = llm.engine.abort(rng.choice(ids))
            ended.update(found)
            aborted.update(found)
        if fails and rng.random() < 0.1:
            to_fail = engines[rng.integers(1, len(engines))].programs.to_fail
            to_fail.append(str(rng.choice(PROGRAMS)))
        touched = llm.engine.step()
        assert len(touched) == len(set(touched))
        ended.update(sample for sample in touched if sample.is_finished)
    for engine in engines:
        engine.programs.to_fail.clear()
    assert ended == Counter(list(whole)) and len(whole) == sum(map(len, expected))
    for sample, output in whole.items():
        is_whole = sample not in aborted
        assert sample.output == output.token_ids[: None if is_whole else sample.num_output]
        assert sample.finish_reason == (output.finish_reason if is_whole else "abort")
        count = len(sample.output) if output.logprobs else 0
        assert [*map(set, sample.logprobs)] == [*map(set, (output.logprobs or [])[:count])]
    assert aborted and ("continue on others" in caplog.text) <= fails
    assert_all_idle(llm)


def test_where_requests_go(llm):
    """A request goes to the replica with its prefix, unless it is too busy; else to the idlest."""
    count = len(llm.engine.engines)
    documents = random_prompts(*[40] * count, vocab_size=VOCAB, seed=7)
    before = llm.metrics().prefix_cache_hits
    generate(llm, documents, LONG.clone())
    generate(llm, [one + [5, 6] for one in documents[::-1]], SamplingParams(max_tokens=2))
    assert llm.metrics().prefix_cache_hits - before == count * 32  # whole pages
    started = [llm.engine.add(llm.make_request(documents[0] + [i], LONG)) for i in range(4 * count)]
    loads = [engine.scheduler.num_unfinished for engine in llm.engine.engines]
    assert min(loads) > 0 and max(loads) <= 2 * min(loads) + 5
    for (sample,) in started:
        assert llm.engine.abort(sample.request.request_id) == [sample]
    assert llm.engine.abort("none") == []
    llm.engine.drain()
    before = llm.metrics().prefix_cache_hits
    assert llm.reset_prefix_cache()
    generate(llm, documents, SamplingParams(max_tokens=2))
    assert llm.metrics().prefix_cache_hits == before


def test_devices_work_at_the_same_time(llm):
    """Each replica waits for its device at the same time as the others."""
    count, met = len(llm.engine.engines), set()
    meeting = threading.Barrier(count)

    def read(self, *arguments, **options):
        if (thread := threading.get_ident()) not in met:
            met.add(thread)
            meeting.wait(10)
        return self.array

    with patched(HostArray, "__array__", read):
        outputs = generate(llm, [[9 + i] for i in range(count)], LONG)
    assert {len(tokens) for tokens in tokens_of(outputs)} == {60} and len(met) == count


def test_a_failure_of_all_replicas_is_raised(llm, expected):
    engines = llm.engine.engines
    for engine in engines:
        engine.programs.to_fail.append("decode")
    with pytest.raises(jax.errors.JaxRuntimeError, match="decode was to fail"):
        generate(llm, *cases())
    assert_all_idle(llm)
    llm._next_id = 0
    assert [output.outputs for output in generate(llm, *cases())] == expected


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_or_error_leaves_a_usable_llm(llm, expected, error):
    engine, steps = llm.engine.engines[-1], []

    def fail(*arguments):
        steps.append(None)
        if len(steps) == 5:
            raise error
        return commit(*arguments)

    commit = engine.scheduler.commit
    with patched(engine.scheduler, "commit", fail), ExitStack() as stack:
        if error is KeyboardInterrupt:
            stack.enter_context(pytest.raises(KeyboardInterrupt))
        assert [output.outputs for output in generate(llm, *cases())] == expected
    llm._next_id = 0
    assert [output.outputs for output in generate(llm, *cases())] == expected
    assert_all_idle(llm)


def test_a_replica_that_cannot_run_again(letters, expected):
    """It gets no more requests, and the other replica runs its requests."""

    def fail():
        raise MemoryError("no state")

    with simulated_llm(letters, "ngram", data_parallel_size=2) as llm:
        first, _ = llm.engine.engines
        first.programs.to_fail.append("decode")
        with patched(first.programs, "renew", fail):
            assert [output.outputs for output in generate(llm, *cases())] == expected
        before = first.metrics().num_steps
        llm.engine.reset()
        llm._next_id = 0
        assert [output.outputs for output in generate(llm, *cases())] == expected
        assert first.metrics().num_steps == before


def test_an_llm_that_is_dropped_in_the_middle_frees_its_engines(letters):
    """This includes engines whose threads wait for their next step."""
    llm = simulated_llm(letters, data_parallel_size=2)
    engines = [weakref.ref(engine) for engine in llm.engine.engines]
    started = llm.generate_stream([[1], [2]], LONG)
    next(started)
    del started, llm
    end = time.monotonic() + 10
    while any(engine() for engine in engines) and time.monotonic() < end:
        gc.collect()
    assert [engine() for engine in engines] == [None, None]


def test_async_callers(letters, expected):
    """Some callers leave, and a device fails. Other callers get one engine's outputs."""

    async def call(llm, prompt, params):
        *_, last = [output async for output in llm.generate_stream(prompt, params)]
        return last.outputs

    async def main():
        async with AsyncLLM(letters, data_parallel_size=2, **SIZES) as llm:
            left = [asyncio.create_task(call(llm, [i], LONG)) for i in range(6)]
            calls = [call(llm, *pair) for pair in [*zip(*cases(), strict=True)][::2]]
            tasks = [asyncio.create_task(one) for one in calls]
            while not llm.metrics().num_decode_steps:
                await asyncio.sleep(0.001)
            llm._llm.engine.engines[1].programs.to_fail.append("decode")
            for task in left:
                task.cancel()
            assert await asyncio.wait_for(asyncio.gather(*tasks), 60) == expected[::2]

    with simulated_engines():
        asyncio.run(main())


@pytest.mark.slow
def test_rollouts(letters):
    """All replicas get new weights at the same place in the outputs, also while asleep."""
    found, (prompts, _) = [], cases()
    with simulated_engines():
        for size in 1, 2:
            with RolloutEngine(letters, data_parallel_size=size, **SIZES) as rl:
                stream = rl.stream(prompts, SamplingParams(max_tokens=20, temperature=0.8))
                rollouts = [next(stream)]
                rl.sleep(2)
                rl.update_weights(jax.tree.map(lambda x: np.asarray(x) * 1.5, rl.params.target))
                rl.wake_up()
                rollouts += stream
                before = [sum(s.num_tokens for s in r.versions if s.version < 1) for r in rollouts]
                assert 0 < sum(before) < sum(len(one.token_ids) for one in rollouts)
                generated = rl.generate(prompts, SamplingParams(max_tokens=20, temperature=0.8))
                found.append([one.token_ids.tolist() for one in generated])
                old = {one.prompt_index: (one, n) for one, n in zip(rollouts, before, strict=True)}
                found.append([old[i][0].token_ids[: old[i][1]].tolist() for i in sorted(old)])
    for one, other in zip(found[1], found[3], strict=True):  # by the old weights
        count = min(len(one), len(other))
        assert one[:count] == other[:count]
    assert found[0] == found[2]


@pytest.mark.slow
def test_real_devices(letters):
    """Weights and caches are on each replica's own devices, also after sleep."""
    found = []
    for options in {}, {"data_parallel_size": 2, "tensor_parallel_size": 2}:
        with make_llm(letters, "ngram", **options) as llm:
            found.append(tokens_of(generate(llm, *cases())))
            for level in 1, 2:
                llm.sleep(level)
                assert llm.is_sleeping()
                llm.wake_up()
            llm._next_id = 0
            found.append(tokens_of(generate(llm, *cases())))
            for i, engine in enumerate(llm.engine.engines):
                arrays = jax.tree.leaves((engine.params, engine.programs.state))
                size = options.get("tensor_parallel_size", 1)
                own = set(jax.local_devices()[i * size : (i + 1) * size])
                assert {device for one in arrays for device in one.devices()} == own
            assert llm.metrics().num_compiles_after_warmup == 0
    assert found[0] == found[1] == found[2] == found[3]


def test_sums_of_metrics(llm):
    generate(llm, *cases())
    parts = [engine.metrics() for engine in llm.engine.engines]
    total = llm.metrics()
    assert total.num_drafts == sum(part.num_drafts for part in parts) > 0
    assert sum(total.k_histogram.values()) == total.num_decode_steps
    accepted, drafted = total.num_accepted_tokens_per_pos, total.num_draft_tokens_per_pos
    assert sum(accepted) == total.num_accepted_tokens
    assert total.acceptance_rate_per_pos == tuple(np.divide(accepted, drafted))
    for name in "host_ms", "budget_use", "in_flight_depth", "mean_acceptance_length":
        values = [getattr(part, name) for part in parts]
        assert min(values) <= getattr(total, name) <= max(values)


def test_sizes_that_are_refused(letters):
    sizes = {"data_parallel_size": 3, "tensor_parallel_size": 2}
    refusal(lambda: make_llm(letters, **sizes), "data_parallel_size=3", "from 1 to 2")
