"""Many callers of one engine: each gets what it would get alone, and none can harm others.

Every wait has a time limit, so that a hanging caller is a failure.
"""

import asyncio
import gc
import importlib
import json
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engines import ANY_SHAPES, generate, held, patched
from support.scripts import TextScript
from support.texts import simulated_llm, with_bytes

from specjax import LLM, AsyncLLM, SamplingParams

LIMIT = 60  # seconds
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=None)
SETTINGS = {
    "max_model_len": 256,
    "max_num_batched_tokens": 32,
    **ANY_SHAPES,
}
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def folder(checkpoints):
    """A target with a tokenizer of single bytes."""
    return with_bytes(checkpoints, checkpoints.target("llama", eos_token_id=5).folder)


@pytest.fixture(scope="module")
def shared(folder) -> Iterator[LLM]:
    """An LLM on a simulated device that AsyncLLMs share. They cannot close it."""
    with simulated_llm(folder, "ngram", k=2, script=TextScript(96), **SETTINGS) as llm:
        with patched(llm, "close", lambda: None):
            yield llm


@pytest.fixture
def built(shared, monkeypatch) -> Iterator[LLM]:
    """The LLM that all AsyncLLMs of a test use."""
    monkeypatch.setattr("specjax.async_llm.LLM", lambda *_, **__: shared)
    yield shared
    shared.engine.reset()


@pytest.fixture
def serve(built) -> Callable[..., Any]:
    """Return a function that runs a coroutine function with a new AsyncLLM.

    At the end, the AsyncLLM must be idle.
    """

    def run(test: Callable[[AsyncLLM], Coroutine], **options: Any) -> Any:
        async def main() -> Any:
            async with AsyncLLM("", **options) as llm:
                result = await test(llm)
                await idle(llm)
                return result

        return asyncio.run(limited(main()))

    return run


async def limited(what: Awaitable) -> Any:
    return await asyncio.wait_for(what, LIMIT)


async def until(condition: Callable[[], Any]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await limited(wait())


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine has no requests, and no cache pages are in use."""

    def is_idle() -> bool:
        engine, metrics = llm._llm.engine, llm.metrics()
        left = metrics.num_requests_running, metrics.num_requests_waiting, metrics.kv_cache_usage
        return left == (0, 0, 0) and not engine.has_work and not llm._streams

    await until(is_idle)


def alone(built: LLM, prompt: Any, params: SamplingParams) -> Any:
    return generate(built, prompt, params)[0].outputs[0]


async def read(llm, prompt, params, started=None, *, leaves=False, **options):
    """Return the last output of a stream. If `leaves`, return the first one and leave the stream.

    `started` is set after each output.
    """
    output = None
    async for output in llm.generate_stream(prompt, params, **options):  # noqa: B007
        if started is not None:
            started.set()
        if leaves:
            break
    return output


@asynccontextmanager
async def under_way(llm: AsyncLLM, prompt: list[int], **options: Any) -> AsyncIterator[Any]:
    """Yield a task that reads a long request. Inside the block, the engine runs no steps."""
    started = asyncio.Event()
    with held(llm._llm) as let_go:
        let_go(8)
        task = asyncio.create_task(read(llm, prompt, LONG, started, **options))
        await limited(started.wait())
        yield task


# --- many callers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_num_requests": 2}], ids=str)
def test_callers_get_what_generate_gives(serve, built, ragged_prompts, options):
    """This includes callers that have to wait because of `max_num_requests`."""
    prompts = ["hello", *ragged_prompts(*(1 + 7 * i % 45 for i in range(23)))]
    params = [
        replace(GREEDY, temperature=i % 2 * 0.8, seed=i, max_tokens=1 + 5 * i % 24)
        for i in range(len(prompts))
    ]
    params[3] = replace(params[3], n=3)
    expected = generate(built, prompts, params)

    async def test(llm):
        calls = [llm.generate(*one) for one in zip(prompts, params, strict=True)]
        return await asyncio.gather(*calls, llm.generate([1, 2, 3]))

    *outputs, by_default = serve(test, **options)
    assert [one.outputs for one in outputs] == [one.outputs for one in expected]
    assert outputs[0].prompt == "hello" and all(one.finished for one in outputs)
    assert len({one.request_id for one in [*outputs, by_default]}) == 1 + len(prompts)
    assert len(by_default.outputs[0].token_ids) <= SamplingParams().max_tokens


def test_outputs_go_on_from_those_before(serve, built):
    """A slow reader misses outputs, but not the last one, and no output is kept for it."""
    expected = alone(built, [1, 2, 3], LONG)

    async def test(llm):
        seen = []
        with held(built) as let_go:
            let_go(4)
            async for output in llm.generate_stream([1, 2, 3], LONG, request_id="mine"):
                seen.append((output.request_id, output.finished, output.outputs))
                let_go(4 if len(seen) < 3 else 1000)
                if len(seen) == 3:
                    await until(lambda: not llm._streams)  # all is there
                    kept = weakref.ref(output)
        del output
        gc.collect()
        return seen, kept()

    seen, kept = serve(test)
    assert kept is None
    names, finished, outputs = zip(*seen, strict=True)
    assert set(names) == {"mine"} and finished == (False, False, False, True)
    lengths = [len(sample.token_ids) for (sample,) in outputs]
    assert lengths == sorted(set(lengths))
    for (sample,), length in zip(outputs, lengths, strict=True):
        assert sample.token_ids == expected.token_ids[:length]
        assert expected.text.startswith(sample.text)
    assert outputs[-1] == [expected]


def test_the_loop_goes_on_while_the_engine_works(serve, built):
    step, has_turned = built.engine.step, threading.Event()

    def wait_and_step():
        assert has_turned.wait(LIMIT), "the loop stood still during a step"
        return step()

    async def test(llm):
        with patched(built.engine, "step", wait_and_step):
            task = asyncio.ensure_future(llm.generate([1, 2], GREEDY))
            for _ in range(10):
                await asyncio.sleep(0.001)
            has_turned.set()
            return await task

    assert serve(test).finished


# --- callers that leave ---------------------------------------------------------------------------


async def six_readers(llm: AsyncLLM, let_go: Callable, moment: str) -> list[asyncio.Task]:
    """Return six tasks that read long requests, at a certain moment. The engine must be held."""
    started = asyncio.Event()
    tasks = [asyncio.create_task(read(llm, [i], LONG, started)) for i in range(6)]
    if moment == "started":
        await until(lambda: started.is_set() or let_go(1))
    elif moment == "waiting":
        await until(lambda: llm.metrics().num_requests_waiting)
    else:
        await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("moment", ["before", "started", "waiting", "left"])
def test_a_caller_that_leaves_aborts(serve, built, moment):
    """A caller leaves if its task is cancelled, at any moment, or if it leaves the iteration."""
    expected = alone(built, [7, 8], GREEDY)
    before = built.metrics().requests_finished.get("abort", 0)

    async def test(llm):
        with held(built) as let_go:
            if moment == "left":
                let_go(8)
                await asyncio.create_task(read(llm, [1, 2, 3], LONG, leaves=True))
            other = asyncio.ensure_future(llm.generate([7, 8], GREEDY))
            tasks = [] if moment == "left" else await six_readers(llm, let_go, moment)
            for task in tasks:
                task.cancel()
            ends = await limited(asyncio.gather(*tasks, return_exceptions=True))
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        return await other

    assert serve(test).outputs == [expected]
    num_aborted = built.metrics().requests_finished.get("abort", 0) - before
    assert num_aborted == 1 or moment != "left"


def test_a_name_is_that_of_one_request_until_it_is_aborted(serve, built):
    expected = alone(built, [1, 2, 3], LONG)

    async def test(llm):
        async with under_way(llm, [1, 2, 3], request_id="mine") as task:
            with pytest.raises(ValueError, match="'mine'.*not finished"):
                await llm.generate([4], GREEDY, request_id="mine")
            with pytest.raises(ValueError, match="scheduling_policy"):
                await llm.generate([4], GREEDY, priority=3)
            names = "yours", "mine", "mine"
            assert [await llm.abort(name) for name in names] == [False, True, False]
        output = await limited(task)
        assert not await llm.abort("mine")
        assert (await llm.generate([1], GREEDY, request_id="mine")).finished
        return output

    output = serve(test)
    (sample,) = output.outputs
    assert output.finished and sample.finish_reason == "abort" and sample.error is None
    assert 0 < len(sample.token_ids) < len(expected.token_ids)
    assert sample.token_ids == expected.token_ids[: len(sample.token_ids)]


def test_leaving_after_the_end_is_no_abort_of_another_with_the_name(serve, built):
    """The first request has ended but is still read, while a second request has the same id."""
    expected = alone(built, [4, 5], LONG)

    async def lag(llm, has_begun, may_go_on):
        async with aclosing(llm.generate_stream([1, 2, 3], GREEDY, request_id="mine")) as stream:
            await anext(stream)
            has_begun.set()
            await may_go_on.wait()

    async def test(llm):
        has_begun, may_go_on = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(lag(llm, has_begun, may_go_on))
        await limited(has_begun.wait())
        await idle(llm)
        async with under_way(llm, [4, 5], request_id="mine") as second:
            may_go_on.set()
            await limited(asyncio.wait([first]))
            assert await llm.is_sleeping() is False  # the engine's thread has done what came before
        return await limited(second)

    assert serve(test).outputs == [expected]


# --- failures -------------------------------------------------------------------------------------


def test_outputs_that_cannot_be_made_are_their_callers_own(serve, built):
    """The error may be of any kind. The engine's thread, which serves all callers, must not end."""
    expected = alone(built, [1, 2, 3], GREEDY)

    async def test(llm):
        with held(built):
            tasks = [asyncio.ensure_future(llm.generate([i, 2, 3], GREEDY)) for i in (1, 4)]
            await until(lambda: len(llm._streams) == 2)
            bad = list(llm._streams.values())[1].outputs
            fail = {"output": property(lambda _: 1 / 0)}
            object.__setattr__(bad, "__class__", type("Bad", (type(bad),), fail))
        return await limited(asyncio.gather(*tasks, return_exceptions=True))

    output, error = serve(test)
    assert output.outputs == [expected] and isinstance(error, ZeroDivisionError)


async def all_waiting(llm: AsyncLLM, most: int) -> list[asyncio.Task]:
    """Return tasks of six long requests, `most` of them in the engine. The engine must be held."""
    calls = [llm.generate([i, 2, 3], LONG) for i in range(6)]
    tasks = [asyncio.ensure_future(call) for call in calls]
    await until(lambda: len(llm._streams) == most)
    return tasks


def test_a_step_that_fails_reaches_every_caller(serve, built):
    expected, step = alone(built, [1, 2, 3], GREEDY), built.engine.step

    async def test(llm):
        with held(built):
            tasks = await all_waiting(llm, 6)
        with patched(built.engine, "step", lambda: step() and 1 / 0):
            ends = await limited(asyncio.gather(*tasks, return_exceptions=True))
        assert all(isinstance(end, ZeroDivisionError) for end in ends), ends
        await idle(llm)
        return await llm.generate([1, 2, 3], GREEDY)

    assert serve(test, max_num_requests=8).outputs == [expected]


def test_an_engine_that_cannot_go_on_tells_every_caller(built):
    """A step fails, and the reset after it fails, too, as on a device without free memory."""

    def fail() -> None:
        raise MemoryError("no state")

    async def main():
        llm = AsyncLLM("", max_num_requests=3)
        with held(built):
            tasks = await all_waiting(llm, 3)
        with patched(built.engine, "reset", fail), patched(built.engine, "step", lambda: 1 / 0):
            ends = await asyncio.wait(tasks, timeout=5)
        with patched(AsyncLLM, "_check_open", lambda _: None):  # a call that comes as it ends
            with pytest.raises(RuntimeError, match="closed"):
                await asyncio.wait_for(llm.abort("mine"), 5)
        await limited(llm.close())
        return ends

    done, left = asyncio.run(limited(main()))
    errors = sorted(type(task.exception()).__name__ for task in done)
    assert not left and errors == 3 * ["MemoryError"] + 3 * ["RuntimeError"]


# --- closing --------------------------------------------------------------------------------------


def test_a_closed_one_says_so(built):
    async def main():
        llm = AsyncLLM("")
        started, not_started = llm.generate_stream([1], LONG), llm.generate_stream([1], GREEDY)
        with held(built) as let_go:
            let_go(8)
            await limited(anext(started))
            await limited(llm.close())
        await limited(llm.close())
        for use in (
            lambda: llm.generate([1]),
            lambda: llm.abort("mine"),
            lambda: anext(not_started),
            lambda: asyncio.to_thread(llm.metrics),
        ):
            with pytest.raises(RuntimeError, match="closed"):
                await limited(use())
        async with aclosing(started):
            assert [one.outputs[0].finish_reason async for one in started] == ["abort"]
        assert not llm._thread.is_alive()

    asyncio.run(limited(main()))


@pytest.mark.parametrize("moment", ["at once", "started"])
def test_closing_ends_every_stream(built, moment):
    """Running streams end with their tokens so far, and waiting streams end with an error."""

    async def main():
        llm = AsyncLLM("", max_num_requests=2)
        with held(built) as let_go:
            tasks = await six_readers(llm, let_go, moment)
            let_go(8)
            await limited(llm.close())
        return await limited(asyncio.gather(*tasks, return_exceptions=True))

    ends = asyncio.run(main())
    errors = [end for end in ends if isinstance(end, Exception)]
    assert all(isinstance(error, RuntimeError) and "closed" in str(error) for error in errors)
    reasons = [end.outputs[0].finish_reason for end in ends if end not in errors]
    assert len(errors) >= 4 and set(reasons) <= {"abort"}
    assert moment == "at once" or reasons


def test_a_loop_that_has_gone_takes_nothing_along(built):
    """After an event loop has closed, its requests are dropped, and other loops are served."""
    expected, llm, loop = alone(built, [1, 2, 3], GREEDY), AsyncLLM(""), asyncio.new_event_loop()
    stream = llm.generate_stream([1], LONG)
    with held(built) as let_go:
        let_go(8)
        loop.run_until_complete(limited(anext(stream)))
        loop.close()

    async def main():
        async with llm:
            return await limited(llm.generate([1, 2, 3], GREEDY))

    assert asyncio.run(main()).outputs == [expected]
    with suppress(RuntimeError):
        asyncio.run(stream.aclose())


# --- settings, and load ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, True])
def test_bad_options_are_refused_before_any_work(bad):
    """The options of `LLM` are tested elsewhere."""
    num_threads = threading.active_count()
    with pytest.raises(ValueError, match="max_num_requests"):
        AsyncLLM("no/such/folder", max_num_requests=bad)
    assert threading.active_count() == num_threads


def test_a_load_of_requests(built, folder, tmp_path, monkeypatch, capsys):
    """A small run of the load benchmark, on the shared engine."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    load, path = importlib.import_module("load_async"), tmp_path / "result.json"
    options = ["--requests", "60", "--callers", "20", "--cancel", "0.5", "--compare", "12"]
    settings = load.read_settings([*options, "--json", str(path)])
    monkeypatch.setattr(load, "LLM", lambda *_, **__: built)
    code = load.measure(folder, None, settings, load.provenance(), {})
    printed = capsys.readouterr().out
    assert code == 0, printed
    result = json.loads(path.read_text())
    rows = {name: value for table in result["tables"] for name, value in table["rows"]}
    assert rows["requests"] == 60 and rows["faults"] == rows["mismatches"] == 0
    given_up = sum(rows[f"given up: {way}"] for way in load.WAYS)
    assert given_up > 5 and rows["finished"] + given_up == 60
    assert rows["compared with runs alone"] == 12
    assert "requests/s" in printed and str(tmp_path) not in path.read_text()
