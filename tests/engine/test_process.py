"""Forked processes and unsuitable settings of JAX are refused, instead of hanging."""

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

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@pytest.fixture(scope="module")
def llm(checkpoints, simulated_device):
    with make_llm(llama(checkpoints).folder) as llm:
        yield llm


def in_fork(call):
    """Return the name and the text of the error that `call` raises in a forked process."""
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


@FORKS
def test_a_forked_process_is_refused(llm, monkeypatch):
    """The fork may also happen while another thread runs a step."""
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

    refusals = [in_fork(use)]
    monkeypatch.setattr(llm.engine, "step", wait_and_step)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(llm.generate, [[1]], params, use_tqdm=False)
        try:
            assert is_within.wait(60)
            refusals.append(in_fork(use))
        finally:
            may_go.set()
        assert other.result(60)[0].finished
    for name, text in refusals:
        assert name == "RuntimeError" and "forked" in text
        assert f"process {os.getpid()}" in text and "spawn" in text


@FORKS
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


@FORKS
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


def test_settings_in_which_no_engine_can_work_are_refused(checkpoints):
    disallow = "jax_transfer_guard", "'disallow'"
    for setting, words in (
        (jax.disable_jit(), ("jax_disable_jit=True", "False")),
        (jax.transfer_guard("disallow"), disallow),
        (jax.transfer_guard_host_to_device("disallow"), disallow),
    ):
        with setting:
            refusal(lambda: make_llm(llama(checkpoints).folder), *words)
