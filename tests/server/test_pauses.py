"""A later pause replaces an earlier one; what fails or is cancelled is undone; simulated."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from support.engines import patched
from support.http import Served, served, until

COMPLETIONS = "/v1/completions"
ASKED = {"prompt": [3, 1, 4], "max_tokens": 4}


@pytest.fixture(scope="module")
def doors(simulated) -> Iterator[Served]:
    """A server on a simulated device."""
    with served(simulated, rl=True) as running:
        yield running


def act(server: Served, path: str) -> None:
    """Send a call of a trainer, which must succeed."""
    answer = server.send("POST", path, headers={})
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("before", ["abort", "wait"])
def test_a_pause_that_keeps_queues_requests_whatever_the_pause_before(doors, before):
    act(doors, f"/pause?mode={before}")
    assert doors.post(COMPLETIONS, ASKED).error == (503, None)
    act(doors, "/pause?mode=keep")
    with ThreadPoolExecutor() as threads:
        later = threads.submit(doors.post, COMPLETIONS, ASKED)
        until(lambda: later.done() or doors.service.admission.num_samples)
        assert not later.done()
        act(doors, "/resume")
        assert later.result().status == 200


@pytest.mark.parametrize("is_half_way", [False, True])
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_sleep_that_fails_is_undone(doors, mode, is_half_way):
    sleeps = doors.llm.sleeps
    begin = sleeps.begin

    def fail(level):
        if is_half_way:
            begin(level)
        raise MemoryError("no memory")

    with patched(sleeps, "begin", fail):
        assert doors.send("POST", f"/sleep?mode={mode}", headers={}).error == (500, None)
    assert not sleeps.level and not doors.service.llm.stops
    assert doors.post(COMPLETIONS, ASKED).status == 200
    act(doors, "/sleep?level=1")
    with patched(sleeps, "begin", fail):  # deeper
        assert doors.send("POST", "/sleep?level=2", headers={}).error == (500, None)
    assert doors.get("/is_sleeping").json == {"is_sleeping": True}
    assert doors.post(COMPLETIONS, ASKED).error == (503, None)
    act(doors, "/wake_up")
    assert doors.post(COMPLETIONS, ASKED).status == 200


@pytest.mark.parametrize("call", ["pause", "sleep"])
def test_a_wait_that_is_cancelled_is_undone(doors, call):
    control, admission = doors.service.control, doors.service.admission
    assert control is not None

    async def cancelled() -> None:
        with admission.admit(1):
            work = control.pause("wait") if call == "pause" else control.sleep(1, "wait")
            with suppress(TimeoutError):
                await asyncio.wait_for(work, 0.05)
            assert not admission.closed

    asyncio.run(cancelled())
    assert not doors.service.llm.stops and not control.is_paused
    assert doors.post(COMPLETIONS, ASKED).status == 200
