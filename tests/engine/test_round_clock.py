"""Measured times of a step's parts, with a clock that the tests set."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from specjax.engine.round_clock import RoundClock


@pytest.fixture
def moment(monkeypatch):
    """The clock of the host. The test sets its field `seconds`."""
    now = SimpleNamespace(seconds=1e3)
    monkeypatch.setattr(time, "perf_counter", lambda: now.seconds)
    return now


def part(start, done=None, shares_program=False) -> Any:
    return SimpleNamespace(start=start, done=done, shares_program=shares_program)


def test_a_part_begins_when_the_one_before_was_done_or_its_planning_began(moment):
    clock = RoundClock()
    clock.time(part(999.0, done=999.5), 0.0)
    assert clock.time(part(999.2, done=999.7), 0.0) == pytest.approx(200)
    assert clock.time(part(999.9, done=999.95), 0.0) == pytest.approx(50)
    assert clock.time(part(999.9), 0.0) == pytest.approx(50), "it was not seen to be ready before"
    assert clock.time(part(1e3), 0.0) is None, "done before the one before it was read"


def test_a_program_of_two_parts_is_timed_once(moment):
    clock = RoundClock()
    clock.time(part(999.0, done=999.5), 0.0)
    assert clock.time(part(999.2, done=999.7), 0.0) == pytest.approx(200)
    assert clock.time(part(999.2, done=999.8, shares_program=True), 0.0) is None
    assert clock.time(part(999.3, done=999.9), 0.0) == pytest.approx(100)


def test_a_compilation_before_a_late_read_disturbs_the_next_round_too(moment):
    """The next round starts when the round before it ends, even if that is read later."""
    clock, compiled = RoundClock(), 0.0

    def time_one(done):
        return clock.time(part(0.0, done=done), compiled)

    for done in 0.1, 0.2, 0.3:
        time_one(done)
    assert time_one(0.4) == pytest.approx(100)
    compiled += 1.0
    assert [time_one(done) for done in (0.5, 0.6)] == [None, None]
    assert time_one(0.7) == pytest.approx(100)


def test_what_ran_beside_a_measurement_is_not_timed(moment):
    clock = RoundClock()
    clock.time(part(998.0, done=998.5), 0.0)
    clock.restart()
    assert clock.start == 1e3
    assert clock.time(part(999.0, done=1000.5), 0.0) is None
    assert clock.time(part(clock.start, done=1000.7), 0.0) == pytest.approx(200)


def test_a_gap_ends_with_the_first_launch_after_a_read(moment):
    clock = RoundClock()
    assert clock.gap() is None, "nothing has been read"
    clock.time(part(999.0), 0.0)
    moment.seconds += 0.25
    assert clock.gap() == 0.25 and clock.gap() is None
