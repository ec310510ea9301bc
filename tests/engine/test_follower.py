"""Processes other than process 0, with fakes for process 0 and for the programs."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from specjax.engine.follower import Follower
from specjax.host import leaving


class Messages(nullcontext):
    """The connection to process 0, which sends only the message that it has closed its LLM."""

    runs = False

    def __init__(self, is_ending):
        super().__init__()
        self._is_ending = is_ending

    def receive(self):
        return "end", self._is_ending

    def close(self):
        pass


@pytest.mark.parametrize("is_ending", [True, False])
def test_it_does_not_compile_on_when_a_signal_ends_process_0(monkeypatch, is_ending):
    codes, waits, is_done = [], [], threading.Event()
    monkeypatch.setattr(leaving, "end_now", codes.append)
    compiler = threading.Thread(target=is_done.wait, name=leaving.COMPILER)
    compiler.start()
    nothing: Any = None
    hosts: Any = Messages(is_ending)
    follower = Follower(hosts, *[nothing] * 5)
    programs: Any = SimpleNamespace(close=lambda: waits.append(not leaving.is_leaving()))
    follower.programs = programs
    try:
        follower.follow()
    finally:
        is_done.set()
        compiler.join()
    assert (codes, waits) == (([0], [False]) if is_ending else ([], [True]))
