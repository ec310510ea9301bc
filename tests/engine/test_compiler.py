"""Compilation in threads: the order, the number of attempts, and failures."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from specjax.engine import compiler as module
from specjax.engine.compiler import NICENESS, Compiler
from specjax.host import leaving


class Gate:
    """A fake compiler that waits for a permit before it compiles a key."""

    def __init__(self):
        self.started: list[str] = []
        self.permits = threading.Semaphore(0)

    def __call__(self, key, is_urgent=True):
        self.started.append(key)
        assert self.permits.acquire(timeout=20)
        if key.startswith("bad"):
            raise ValueError(f"{key} is bad")
        return key.upper()

    def let(self, count):
        for _ in range(count):
            self.permits.release()


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def compiler(gate):
    made = Compiler(gate)
    yield made
    gate.let(100)
    made.close()


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def in_threads(call):
    """Start four threads that run `call`, and return a function that waits for all of them."""
    threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    return lambda: [thread.join(timeout=5) for thread in threads]


def test_the_urgent_go_first_in_their_order(compiler, gate):
    compiler.ask("ab", is_urgent=False)
    wait_until(lambda: gate.started)
    compiler.ask("xy", is_urgent=True)
    compiler.ask("by", is_urgent=True)  # what was for later is urgent now
    compiler.ask("c", is_urgent=False)
    gate.let(5)
    compiler.wait_for(list("abcxy"), lambda num_there: None)
    urgent, later = ([key for key in gate.started if key in keys] for keys in ("xyb", "ac"))
    assert (urgent, later) == (list("xyb"), list("ac"))
    assert compiler.ready == {key: key.upper() for key in "abcxy"} and not compiler.is_busy


def test_the_urgent_wait_for_no_thread_that_compiles_something_else(compiler, gate):
    compiler.ask("ab", is_urgent=False)
    wait_until(lambda: gate.started)
    compiler.ask("xy", is_urgent=True, num_threads=2)
    wait_until(lambda: len(gate.started) == 3)
    assert gate.started[0] == "a" and set(gate.started[1:]) == set("xy")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_what_no_request_waits_for_is_compiled_at_a_low_priority():
    """Serving and urgent programs then get the cores. The compiler is told what is urgent."""

    def priority(key=None, is_urgent=True):
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), is_urgent

    compiler, (own, _) = Compiler(priority), priority()
    for key, is_urgent in (("later", False), ("urgent", True), ("last", False)):
        compiler.ask([key], is_urgent=is_urgent)
        wait_until(lambda key=key: key in compiler.ready)
    compiler.ask(["awaited"], is_urgent=False, is_awaited=True)
    wait_until(lambda: "awaited" in compiler.ready)
    assert compiler.ready.pop("awaited") == (own, False)
    later = NICENESS, False
    assert compiler.ready == {"later": later, "urgent": (own, True), "last": later}
    assert own < NICENESS and priority() == (own, True)
    compiler.close()


def test_each_is_compiled_once(compiler, gate):
    got: list[str] = []
    join = in_threads(lambda: got.append(compiler.get("a")))
    compiler.ask("aa", is_urgent=False)
    wait_until(lambda: gate.started)
    gate.let(1)
    join()
    compiler.ask("a", is_urgent=True)
    assert got == ["A"] * 4 and gate.started == ["a"] and compiler.get("a") == "A"


def test_several_at_a_time_and_progress_is_told(compiler, gate):
    told: list[int] = []
    compiler.ask("abcd", is_urgent=True, num_threads=3)
    wait_until(lambda: len(gate.started) == 3)
    assert compiler.num_asked == 4
    gate.let(4)
    compiler.wait_for(list("abcd"), told.append)
    assert told[-1] == 4 and told == sorted(told)
    before = compiler.seconds
    time.sleep(0.01)
    assert compiler.seconds == before > 0, "nothing is compiled"


def test_one_that_fails_keeps_no_other_from_its_turn(compiler, gate):
    compiler.ask(["bad", "a"], is_urgent=False)
    gate.let(2)
    wait_until(lambda: not compiler.is_busy)
    assert set(compiler.ready) == {"a"} and str(compiler.failures["bad"]) == "bad is bad"
    compiler.ask(["bad"], is_urgent=True)  # not again
    assert not compiler.is_busy
    with pytest.raises(ValueError, match="bad is bad"):
        compiler.wait_for(["bad"], lambda num_there: None)
    gate.let(1)
    with pytest.raises(ValueError, match="bad is bad"):
        compiler.get("bad")  # told once, it is tried anew
    assert gate.started == ["bad", "a", "bad"]


def test_all_who_wait_for_one_that_fails_are_told(compiler, gate):
    """All waiting threads get the error. If only one got it, the others would wait forever."""
    found: list[str] = []

    def wait():
        try:
            compiler.get("bad")
        except ValueError as error:
            found.append(str(error))

    join = in_threads(wait)
    wait_until(lambda: gate.started)
    time.sleep(0.05)  # all of them wait
    gate.let(4)
    join()
    assert found == ["bad is bad"] * 4


def test_threads_end_when_there_is_nothing_to_do(compiler, gate):
    compiler.ask("a", is_urgent=True)
    threads = compiler._urgent.threads
    (thread,) = threads
    gate.let(1)
    thread.join(20)
    assert not thread.is_alive() and not threads


def test_few_maps_are_for_what_is_needed(compiler, gate, monkeypatch, caplog):
    """If few memory maps are left, only needed programs are compiled.

    Without any, an error is raised.
    """
    monkeypatch.setattr(module, "maps_in_use", lambda: 0.64)
    compiler.ask("y", is_urgent=False)
    gate.let(4)
    wait_until(lambda: set(compiler.ready) == {"y"} and not compiler.is_busy)
    monkeypatch.setattr(module, "maps_in_use", lambda: 0.66)
    for keys in "abc", "d":
        compiler.ask(keys, is_urgent=False)
        wait_until(lambda: not compiler.is_busy)
    assert compiler.get("x") == "X"
    wait_until(lambda: not compiler.is_busy)
    assert set(compiler.ready) == {"x", "y"} and not compiler.failures
    (record,) = caplog.records
    assert "66 % of this process's memory maps" in record.message
    monkeypatch.setattr(module, "maps_in_use", lambda: 0.95)
    with pytest.raises(MemoryError, match="95% of the memory maps.*close LLMs"):
        compiler.get("a")
    assert not compiler.is_busy


def test_what_an_interrupted_wait_was_for_is_not_begun(compiler, gate):
    def interrupt(num_there):
        wait_until(lambda: gate.started)
        raise KeyboardInterrupt

    compiler.ask("ab", is_urgent=True)
    with pytest.raises(KeyboardInterrupt):
        compiler.wait_for(["a", "b"], interrupt)
    assert compiler.num_asked == 1
    gate.let(2)
    assert compiler.get("b") == "B" and gate.started == ["a", "b"], "asked for once more, it is"


def test_closing_waits_for_what_is_under_way_and_says_so(gate, monkeypatch, caplog):
    """No further compilation starts."""
    monkeypatch.setattr(leaving, "PATIENCE", 0.0)
    compiler = Compiler(gate)
    compiler.ask("abc", is_urgent=True, num_threads=2)
    wait_until(lambda: len(gate.started) == 2)
    closing = threading.Thread(target=compiler.close)
    closing.start()
    wait_until(lambda: caplog.records)
    gate.let(2)
    closing.join()
    assert sorted(gate.started) == ["a", "b"] and not compiler.ready
    assert "specjax-compiler" not in [thread.name for thread in threading.enumerate()]
    (told,) = caplog.messages
    assert told.startswith("waiting for 2 programs that XLA is compiling")


SCRIPT = """
import logging, sys, time, types
import specjax.cli
from specjax.engine.compiler import Compiler
from specjax.host import leaving

logging.basicConfig()
leaving.PATIENCE = 0.1

def compile(key, is_urgent):
    print("begun", flush=True)
    time.sleep(SECONDS)
    print(key, "is compiled")

def run(_):
    compiler = Compiler(compile)
    compiler.ask(["first"], is_urgent=True)
    compiler.get("first")

if sys.argv[1:] == ["bench"]:
    from specjax.bench import comparison
    comparison.load_llm = lambda *_: run(None)
elif sys.argv[1:]:
    specjax.cli.import_module = lambda name: types.SimpleNamespace(run=run)
if sys.argv[1:]:
    sys.exit(specjax.cli.main(sys.argv[1:]))
run(None)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, times",
    [([], 1), ([], 2), (["generate", "x"], 1), (["generate", "x"], 2), (["bench"], 2)],
    ids=str,
)
def test_ctrl_c_says_what_is_waited_for_and_a_second_one_ends_it(arguments, times):
    seconds = 1 if times == 1 else 30
    command = [sys.executable, "-c", SCRIPT.replace("SECONDS", str(seconds)), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        said = ""
        while "waiting for 1 program that XLA is compiling and cannot stop" not in said:
            assert (line := process.stderr.readline()), said
            said += line
        if times == 2:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    if arguments == ["bench"]:  # it ends as soon as what was measured is shown
        assert out.startswith("interrupted after 0 rounds") and not err
        out = ""
    assert out == ("first is compiled\n" if times == 1 else "")
    if arguments or times == 2:
        assert process.returncode == 130
    if arguments:
        assert said.startswith("specjax: interrupted\n")
