"""Processes and settings of JAX in which no engine can work are refused, and do not hang."""

import asyncio
import os
import pickle
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from support.engines import make_llm
from support.refusals import refusal
from support.shared_models import llama

from specjax import AsyncLLM, SamplingParams
from specjax.engine.process import OwnLock
from specjax.rl.turns import Turns


@pytest.fixture(scope="module")
def llm(checkpoints, simulated_device):
    with make_llm(llama(checkpoints).folder) as llm:
        yield llm


def in_fork(call):
    """The error that a function raises in a forked process, and what of it is text."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of a fork with threads
        child = os.fork()
    if child == 0:
        try:
            call()
            said = None, ""
        except BaseException as error:
            said = type(error).__name__, str(error)
        os.write(writer, pickle.dumps(said))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        said = pickle.loads(file.read())
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_is_refused(llm):
    params = SamplingParams(max_tokens=2)
    name, text = in_fork(lambda: llm.generate([[1]], params, use_tqdm=False))
    assert name == "RuntimeError" and f"process {os.getpid()}" in text and "spawn" in text
    assert llm.generate([[1]], params, use_tqdm=False)[0].finished


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_in_the_middle_of_another_threads_step_is_refused(llm, monkeypatch):
    params = SamplingParams(max_tokens=2)
    is_within, may_go, step = threading.Event(), threading.Event(), llm.engine.step

    def wait_and_step():
        is_within.set()
        assert may_go.wait(60)
        return step()

    def use():
        signal.alarm(20)  # ends a child that waits
        llm.close()  # does nothing to what is the parent's
        llm.generate([[1]], params, use_tqdm=False)

    monkeypatch.setattr(llm.engine, "step", wait_and_step)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(llm.generate, [[1]], params, use_tqdm=False)
        try:
            assert is_within.wait(60)
            name, text = in_fork(use)
        finally:
            may_go.set()
        assert other.result(60)[0].finished
    assert name == "RuntimeError" and "forked" in text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("make", [OwnLock, Turns])
def test_a_fork_does_not_wait_for_a_lock_that_it_has_no_holder_of(make):
    lock = make()

    def use():
        signal.alarm(10)
        with lock:
            pass

    with lock:
        name, text = in_fork(use)
    assert name == "RuntimeError" and "forked" in text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_of_an_async_engine_is_refused(llm, monkeypatch):
    monkeypatch.setattr("specjax.async_llm.LLM", lambda *_, **__: llm)
    monkeypatch.setattr(llm, "close", lambda: None)
    served = AsyncLLM("")

    async def ask():
        await asyncio.wait_for(served.generate([1], SamplingParams(max_tokens=2)), 20)

    try:
        name, text = in_fork(lambda: asyncio.run(ask()))
        assert name == "RuntimeError" and "forked" in text
        asyncio.run(ask())
    finally:
        served.shutdown()


def test_engines_without_compiled_programs_are_refused(checkpoints):
    with jax.disable_jit():
        refusal(lambda: make_llm(llama(checkpoints).folder), "jax_disable_jit=True", "False")


@pytest.mark.parametrize("guard", [jax.transfer_guard, jax.transfer_guard_host_to_device])
def test_engines_whose_arrays_may_not_move_are_refused(checkpoints, guard):
    with guard("disallow"):
        refusal(lambda: make_llm(llama(checkpoints).folder), "jax_transfer_guard", "'disallow'")
