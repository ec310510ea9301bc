"""Threads that share an LLM: each gets what it would get alone."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.engines import ANY_SHAPES, generate, patched
from support.scripts import TextScript
from support.texts import simulated_llm, with_bytes

from specjax import SamplingParams

VOCAB, THREADS, CALLS = 96, 8, 20
LONG = SamplingParams(max_tokens=40, temperature=0)
OPTIONS = {
    "max_model_len": 64,
    "num_pages": 12,
    "page_size": 16,
    **ANY_SHAPES,
}


@pytest.fixture(scope="module")
def folder(checkpoints):
    return with_bytes(checkpoints, checkpoints.target("llama", num_hidden_layers=3).folder)


@pytest.fixture
def llm(folder):
    with simulated_llm(folder, script=TextScript(VOCAB), **OPTIONS) as llm:
        yield llm


@pytest.fixture
def hurry():
    """Let the interpreter switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def calls_of(thread):
    """Return the prompts and parameters of a thread's calls.

    Some calls have several prompts or samples.
    """
    rng = np.random.default_rng(thread)
    for _ in range(CALLS):
        prompts = [rng.integers(6, VOCAB, rng.integers(1, 20)).tolist() for _ in range(2)]
        params = SamplingParams(
            n=int(rng.integers(1, 3)),
            max_tokens=int(rng.integers(1, 12)),
            temperature=float(rng.integers(0, 2)),
            seed=int(rng.integers(1000)),
            logprobs=2,
        )
        yield prompts[: rng.integers(1, 3)], params


def results_of(llm, thread):
    """Return the results of a thread's calls. Every other call streams."""
    found = []
    for number, call in enumerate(calls_of(thread)):
        if number % 2:
            last = {output.request_id: output for output in llm.generate_stream(*call)}
            outputs = [last[request_id] for request_id in sorted(last, key=int)]
        else:
            outputs = generate(llm, *call)
        found += [output.outputs for output in outputs]
    return found


@pytest.mark.slow
def test_every_thread_gets_what_it_would_get_alone(llm, hurry):
    alone = [results_of(llm, thread) for thread in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(lambda thread: results_of(llm, thread), range(THREADS))) == alone
    assert not llm.engine.has_work
    samples = [sample for found in alone for outputs in found for sample in outputs]
    assert all(sample.finish_reason == "length" for sample in samples)


def test_calls_of_several_threads_run_in_the_same_steps(llm):
    """Four requests take hardly more steps than one."""
    everyone = threading.Barrier(4)

    def call(number):
        everyone.wait()
        return generate(llm, [7 + number], LONG)[0].outputs

    expected = generate(llm, [7], LONG)[0].outputs
    alone = llm.metrics().num_decode_steps
    step, have_come = llm.engine.step, []

    def step_together():
        """Run a step only when all threads have queued their requests."""
        if len(llm.engine.unfinished_ids) == 4:
            have_come.append(True)
        return step() if have_come else []

    with patched(llm.engine, "step", step_together), ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(call, range(4)))
    assert outputs[0] == expected
    assert llm.metrics().num_decode_steps - alone <= alone + 4


def test_leaving_a_stream_or_closing_leaves_others_alone(llm):
    expected = generate(llm, [9], LONG)[0].outputs
    left = llm.generate_stream([8], LONG)
    next(left)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(generate, llm, [9], LONG)
        left.close()
        assert other.result()[0].outputs == expected
    open_stream = llm.generate_stream([8], LONG)
    next(open_stream)
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        list(open_stream)


def test_an_engine_in_the_middle_of_a_step_says_so(llm):
    """Calling the engine directly, without the LLM's lock, raises an error."""
    begun, may_end = threading.Event(), threading.Event()
    schedule = llm.engine.scheduler.schedule

    def slow():
        begun.set()
        assert may_end.wait(10)
        return schedule()

    with patched(llm.engine.scheduler, "schedule", slow), ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, llm, [9], LONG)
        assert begun.wait(10)
        with pytest.raises(RuntimeError, match="runs a step for another thread; share its LLM"):
            llm.engine.step()
        may_end.set()
        assert running.result()[0].finished
