"""Many callers, one engine: each gets what it would get alone, and none can hurt another.

Whatever is awaited must come within a time limit, so that a caller that hangs is a failure.
"""

import asyncio
import dataclasses
import gc
import importlib
import json
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.scripts import TextScript
from support.texts import simulated_llm, with_bytes

from specjax import LLM, AsyncLLM, SamplingParams
from specjax.text.tokenizer import ChatTokenizer

VOCAB = 96
EOS = 5
LIMIT = 60  # seconds
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=None)
SETTINGS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_logprobs": 0,
    "decode_batches": None,
    "prefill_shapes": None,
}
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", eos_token_id=EOS)


@pytest.fixture(scope="module")
def folder(checkpoints, target):
    """The target with a tokenizer of single bytes."""
    return with_bytes(checkpoints, target.folder)


@pytest.fixture(scope="module")
def built(checkpoints, target, folder) -> Iterator[LLM]:
    """The engine that every AsyncLLM of this module is given, on a simulated device."""
    head = checkpoints.eagle3(target).folder
    script = TextScript(VOCAB)  # the same with drafts and without
    with simulated_llm(folder, "eagle3", model=head, k=2, script=script, **SETTINGS) as llm:
        yield llm


@pytest.fixture
def serve(built, monkeypatch) -> Callable[..., Any]:
    """Run a coroutine function with a new AsyncLLM, which must be idle at the end."""

    def run(test: Callable[[AsyncLLM], Coroutine], **options: Any) -> Any:
        async def main() -> Any:
            async with AsyncLLM("", **options) as llm:
                result = await test(llm)
                await idle(llm)
                return result

        return asyncio.run(limited(main()))

    monkeypatch.setattr("specjax.async_llm.LLM", lambda *_, **__: built)
    monkeypatch.setattr(built, "close", lambda: None)
    yield run
    built.engine.reset()


async def limited(what: Awaitable) -> Any:
    return await asyncio.wait_for(what, LIMIT)


async def idle(llm: AsyncLLM) -> None:
    """Wait until nothing is left of any request."""

    async def wait() -> None:
        while not is_idle(llm):
            await asyncio.sleep(0.005)

    await limited(wait())


def is_idle(llm: AsyncLLM) -> bool:
    engine, metrics = llm._llm.engine, llm.metrics()
    left = metrics.num_requests_running, metrics.num_requests_waiting, metrics.kv_cache_usage
    return left == (0, 0, 0) and not engine.has_work and not llm._streams


async def until(condition: Callable[[], Any]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await limited(wait())


def alone(built: LLM, prompt: Any, params: SamplingParams) -> Any:
    return built.generate(prompt, params, use_tqdm=False)[0].outputs[0]


@contextmanager
def patched(target: object, name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


@contextmanager
def held(built: LLM) -> Iterator[Callable[[int], None]]:
    """Within, the engine makes no step but those let go; the thread that asks for them goes on.

    A request of `LONG` takes more than 80 steps, so that it has not ended after a few.
    """
    step, allowed = built.engine.step, threading.Semaphore(0)

    def step_if_allowed() -> list:
        return step() if allowed.acquire(timeout=0.001) else []

    with patched(built.engine, "step", step_if_allowed):
        yield allowed.release


# --- many callers ---------------------------------------------------------------------------------


def test_callers_get_what_generate_gives(serve, built, ragged_prompts):
    prompts = ["hello", *ragged_prompts(*(1 + 7 * i % 45 for i in range(23)))]
    params = [
        dataclasses.replace(GREEDY, temperature=i % 2 * 0.8, seed=i, max_tokens=1 + 5 * i % 24)
        for i in range(len(prompts))
    ]
    params[3] = dataclasses.replace(params[3], n=3)
    expected = built.generate(prompts, params, use_tqdm=False)

    async def test(llm):
        calls = zip(prompts, params, strict=True)
        return await asyncio.gather(*(llm.generate(*one) for one in calls))

    outputs = serve(test)
    assert [one.outputs for one in outputs] == [one.outputs for one in expected]
    assert outputs[0].prompt == "hello" and all(one.finished for one in outputs)
    assert len({one.request_id for one in outputs}) == len(prompts)


def test_outputs_go_on_from_those_before(serve, built):
    expected = alone(built, [1, 2, 3], LONG)

    async def test(llm):
        outputs = []
        with held(built) as let_go:
            let_go(4)
            async for output in llm.generate_stream([1, 2, 3], LONG, request_id="mine"):
                outputs.append(output)
                let_go(4 if len(outputs) < 3 else 1000)
        return outputs

    outputs = serve(test)
    assert {one.request_id for one in outputs} == {"mine"}
    assert [one.finished for one in outputs] == [False] * (len(outputs) - 1) + [True]
    lengths = [len(one.outputs[0].token_ids) for one in outputs]
    assert lengths == sorted(set(lengths)) and len(lengths) > 2
    for one, length in zip(outputs, lengths, strict=True):
        assert one.outputs[0].token_ids == expected.token_ids[:length]
        assert expected.text.startswith(one.outputs[0].text)
    assert outputs[-1].outputs == [expected]


def test_defaults_are_those_of_sampling_params(serve):
    async def test(llm):
        return await llm.generate([1, 2, 3])

    assert len(serve(test).outputs[0].token_ids) <= SamplingParams().max_tokens


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


def test_no_more_are_in_the_engine_than_may_be(serve, built, ragged_prompts):
    prompts = ragged_prompts(3, 9, 20, 5, 6, 7)
    expected = [alone(built, prompt, GREEDY).token_ids for prompt in prompts]
    most, add = 0, built.engine.add

    def count(request):
        nonlocal most
        samples = add(request)
        most = max(most, len(built.engine.scheduler._live))
        return samples

    async def test(llm):
        with patched(built.engine, "add", count):
            return await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in prompts))

    outputs = serve(test, max_num_requests=2)
    assert [one.outputs[0].token_ids for one in outputs] == expected
    assert most == 2


def test_a_slow_reader_misses_some_but_not_the_last(serve, built):
    expected = alone(built, [1, 2, 3], LONG)

    async def test(llm):
        outputs = []
        with held(built) as let_go:
            let_go(4)
            async for output in llm.generate_stream([1, 2, 3], LONG):
                outputs.append(output)
                let_go(4 if len(outputs) == 1 else 1000)
                if len(outputs) == 2:
                    await until(lambda: not llm._streams)  # all is there
                    kept = weakref.ref(output)
        outputs.pop(1)
        del output
        gc.collect()
        return [one.outputs[0].token_ids for one in outputs], kept()

    lengths, kept = serve(test)
    assert len(lengths) == 2 and lengths[-1] == expected.token_ids
    assert kept is None


# --- callers that leave ---------------------------------------------------------------------------


async def read(llm, prompt, params, started=None, **options):
    output = None
    async for output in llm.generate_stream(prompt, params, **options):  # noqa: B007
        if started is not None:
            started.set()
    return output


@pytest.mark.parametrize("moment", ["before", "started", "waiting"])
def test_cancelling_a_task_aborts(serve, built, moment):
    expected = alone(built, [7, 8], GREEDY)

    async def test(llm):
        started = asyncio.Event()
        with held(built) as let_go:
            other = asyncio.ensure_future(llm.generate([7, 8], GREEDY))
            tasks = [asyncio.create_task(read(llm, [i], LONG, started)) for i in range(6)]
            if moment == "before":
                await asyncio.sleep(0)
            elif moment == "started":
                let_go(8)
                await limited(started.wait())
            else:
                await until(lambda: llm.metrics().num_requests_waiting)
            for task in tasks:
                task.cancel()
            ends = await limited(asyncio.gather(*tasks, return_exceptions=True))
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        return await other

    assert serve(test).outputs == [expected]


@pytest.mark.parametrize("way", ["break", "aclose", "raise", "cancel"])
def test_leaving_the_iteration_aborts(serve, built, way):
    before = built.metrics().requests_finished.get("abort", 0)

    async def leave(llm):
        stream = llm.generate_stream([1, 2, 3], LONG)
        async for _ in stream:
            if way == "break":
                break
            if way == "raise":
                raise LookupError
            if way == "cancel":
                asyncio.current_task().cancel()
                await asyncio.sleep(LIMIT)
            if way == "aclose":
                await stream.aclose()

    async def test(llm):
        with held(built) as let_go, suppress(LookupError, asyncio.CancelledError):
            let_go(8)
            await asyncio.create_task(leave(llm))
        await idle(llm)
        assert await llm.generate([1, 2, 3], GREEDY)

    serve(test)
    assert built.metrics().requests_finished["abort"] == before + 1


def test_aborting_by_name(serve, built):
    expected = alone(built, [1, 2, 3], LONG)

    async def test(llm):
        started = asyncio.Event()
        with held(built) as let_go:
            let_go(8)
            task = asyncio.create_task(read(llm, [1, 2, 3], LONG, started, request_id="mine"))
            await limited(started.wait())
            assert not await llm.abort("yours")
            assert await llm.abort("mine")
            assert not await llm.abort("mine")
        output = await limited(task)
        assert not await llm.abort("mine")
        # The name is free again.
        assert (await llm.generate([1], GREEDY, request_id="mine")).finished
        return output

    output = serve(test)
    (sample,) = output.outputs
    assert output.finished and sample.finish_reason == "abort" and sample.error is None
    assert 0 < len(sample.token_ids) < len(expected.token_ids)
    assert sample.token_ids == expected.token_ids[: len(sample.token_ids)]


@pytest.mark.parametrize("way", ["aclose", "cancel"])
def test_leaving_after_the_end_is_no_abort_of_another_with_the_name(serve, built, way):
    """The first request has ended, its consumer lags, and a second has taken its id."""
    expected = alone(built, [4, 5], LONG)

    async def lag(llm, has_begun, may_go_on):
        stream = llm.generate_stream([1, 2, 3], GREEDY, request_id="mine")
        await anext(stream)
        has_begun.set()
        try:
            await may_go_on.wait()
        finally:
            await stream.aclose()

    async def test(llm):
        has_begun, may_go_on, started = (asyncio.Event() for _ in range(3))
        first = asyncio.create_task(lag(llm, has_begun, may_go_on))
        await limited(has_begun.wait())
        await idle(llm)
        with held(built) as let_go:
            let_go(8)
            second = asyncio.create_task(read(llm, [4, 5], LONG, started, request_id="mine"))
            await limited(started.wait())
            may_go_on.set() if way == "aclose" else first.cancel()
            await limited(asyncio.wait([first]))
            assert await llm.is_sleeping() is False  # the engine's thread has done what came before
        return await limited(second)

    assert serve(test).outputs == [expected]


def test_a_stream_left_after_its_end_is_no_abort_of_another_with_the_name(built):
    stream = built.generate_stream([1, 2, 3], GREEDY)
    name = next(stream).request_id
    built.generate([1], LONG, use_tqdm=False)  # which runs the other to its end as well
    second = built.start(built.make_request([4, 5], GREEDY, request_id=name))
    stream.close()
    while not second.is_finished:
        built.engine.step()
    built.engine.drain()
    assert second.output().outputs[0].finish_reason == "length"


# --- callers with bad wishes ----------------------------------------------------------------------


def test_a_name_is_that_of_one_request(serve, built):
    expected = alone(built, [1, 2, 3], LONG)

    async def test(llm):
        started = asyncio.Event()
        with held(built) as let_go:
            let_go(8)
            task = asyncio.create_task(read(llm, [1, 2, 3], LONG, started, request_id="mine"))
            await limited(started.wait())
            with pytest.raises(ValueError, match="'mine'.*not finished"):
                await llm.generate([4], GREEDY, request_id="mine")
        return await limited(task)

    assert serve(test).outputs == [expected]


def test_a_number_as_a_name_hurts_nobody(serve, built):
    async def test(llm):
        number = int((await llm.generate([1], GREEDY)).request_id)
        started = asyncio.Event()
        with held(built) as let_go:
            let_go(8)
            task = asyncio.create_task(read(llm, [1], LONG, started, request_id=str(number + 3)))
            await limited(started.wait())
            others = [asyncio.ensure_future(llm.generate([i], GREEDY)) for i in range(3)]
            await until(lambda: len(llm._streams) == 4)
        outputs = await asyncio.gather(*others)
        return [(await limited(task)).request_id, *(one.request_id for one in outputs)]

    assert len(set(serve(test))) == 4


@pytest.mark.parametrize(
    "arguments, words",
    [
        (([],), "empty"),
        (([1, VOCAB],), "token id 96"),
        (([1] * 300,), "max_model_len=256"),
        (([1], "greedy"), "must be a SamplingParams"),
        (([1], SamplingParams(stop_token_ids=[VOCAB])), "stop_token_ids"),
        (([1], SamplingParams(logprobs=3)), "max_logprobs=0"),
    ],
    ids=["empty", "token", "long", "params", "stop", "logprobs"],
)
def test_a_bad_wish_is_its_callers_own(serve, built, arguments, words):
    expected = alone(built, [1, 2, 3], GREEDY)

    async def test(llm):
        task = asyncio.ensure_future(llm.generate([1, 2, 3], GREEDY))
        with pytest.raises(ValueError, match=words):
            await llm.generate(*arguments)
        with pytest.raises(ValueError, match="scheduling_policy"):
            await llm.generate([1], GREEDY, priority=3)
        return await task

    assert serve(test).outputs == [expected]


def test_a_text_that_cannot_be_had_is_its_callers_own(serve, built):
    expected = alone(built, [1, 2, 3], GREEDY)
    decode, short = ChatTokenizer.decode, dataclasses.replace(GREEDY, max_tokens=7)

    def fail(self, ids):
        if len(ids) == 2 + 7:  # the prompt, and all of the output
            raise LookupError("no such text")
        return decode(self, ids)

    async def test(llm):
        calls = llm.generate([1, 2, 3], GREEDY), llm.generate([4, 5], short)
        with patched(ChatTokenizer, "decode", fail):
            return await limited(asyncio.gather(*calls))

    output, failed = serve(test)
    assert output.outputs == [expected]
    assert len(failed.outputs[0].token_ids) == 7
    assert isinstance(failed.outputs[0].error, LookupError)


def test_outputs_that_cannot_be_made_are_their_callers_own(serve, built):
    """Whatever it is: the thread that all others wait for must not end."""
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


def test_a_step_that_fails_reaches_every_caller(serve, built):
    expected, step = alone(built, [1, 2, 3], GREEDY), built.engine.step

    async def test(llm):
        calls = [llm.generate([i, 2, 3], LONG) for i in range(6)]
        with held(built):
            tasks = [asyncio.ensure_future(call) for call in calls]
            await until(lambda: len(llm._streams) == 6)
        with patched(built.engine, "step", lambda: step() and 1 / 0):
            ends = await limited(asyncio.gather(*tasks, return_exceptions=True))
        assert all(isinstance(end, ZeroDivisionError) for end in ends), ends
        await idle(llm)
        return await llm.generate([1, 2, 3], GREEDY)

    assert serve(test, max_num_requests=8).outputs == [expected]


def test_an_engine_that_cannot_go_on_tells_every_caller(built, monkeypatch):
    """After a failure whose reset fails too, as of a device that is out of memory."""
    monkeypatch.setattr("specjax.async_llm.LLM", lambda *_, **__: built)
    monkeypatch.setattr(built, "close", lambda: None)

    def fail() -> None:
        raise MemoryError("no state")

    async def main():
        llm = AsyncLLM("", max_num_requests=3)
        with held(built):
            calls = [llm.generate([i, 2, 3], LONG) for i in range(6)]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await until(lambda: len(llm._streams) == 3)
        with patched(built.engine, "reset", fail), patched(built.engine, "step", lambda: 1 / 0):
            ends = await asyncio.wait(tasks, timeout=5)
        with patched(AsyncLLM, "_check_open", lambda _: None):  # a call that comes as it ends
            with pytest.raises(RuntimeError, match="closed"):
                await asyncio.wait_for(llm.abort("mine"), 5)
        await limited(llm.close())
        return ends

    try:
        done, left = asyncio.run(limited(main()))
    finally:
        built.engine.reset()
    errors = [task.exception() for task in done]
    assert not left and sorted(type(e).__name__ for e in errors) == 3 * ["MemoryError"] + 3 * [
        "RuntimeError"
    ]


# --- closing --------------------------------------------------------------------------------------


def test_a_closed_one_says_so(serve, built):
    async def test(llm):
        started = llm.generate_stream([1], LONG)
        not_started = llm.generate_stream([1], GREEDY)
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

    async def main():
        async with AsyncLLM("") as llm:
            await test(llm)

    asyncio.run(limited(main()))


@pytest.mark.parametrize("moment", ["at once", "started"])
def test_closing_ends_every_stream(serve, built, moment):
    """Those under way with what they have, those that wait for their turn with an error."""

    async def test():
        llm, started = AsyncLLM("", max_num_requests=2), asyncio.Event()
        with held(built) as let_go:
            let_go(8)
            tasks = [asyncio.create_task(read(llm, [i], LONG, started)) for i in range(6)]
            await (asyncio.sleep(0) if moment == "at once" else limited(started.wait()))
            await limited(llm.close())
        return await limited(asyncio.gather(*tasks, return_exceptions=True))

    ends = asyncio.run(test())
    errors = [end for end in ends if isinstance(end, Exception)]
    assert all(isinstance(error, RuntimeError) and "closed" in str(error) for error in errors)
    reasons = [end.outputs[0].finish_reason for end in ends if end not in errors]
    assert len(errors) >= 4 and set(reasons) <= {"abort"}
    assert moment == "at once" or reasons


def test_a_loop_that_has_gone_takes_nothing_along(serve, built):
    """As after an interrupt: its requests are given up, and those of another loop are served."""
    expected = alone(built, [1, 2, 3], GREEDY)
    llm = AsyncLLM("")

    loop = asyncio.new_event_loop()
    stream = llm.generate_stream([1], LONG)
    with held(built) as let_go:
        let_go(8)
        loop.run_until_complete(limited(anext(stream)))
        loop.close()

    async def test():
        output = await limited(llm.generate([1, 2, 3], GREEDY))
        await limited(llm.close())
        return output

    assert asyncio.run(test()).outputs == [expected]
    with suppress(RuntimeError):
        asyncio.run(stream.aclose())


# --- bad settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "2"])
def test_a_bad_number_of_requests_is_refused_before_any_work(monkeypatch, value):
    monkeypatch.setattr("specjax.async_llm.LLM", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=f"max_num_requests={value!r}"):
        AsyncLLM("", max_num_requests=value)


def test_options_are_those_of_llm(target):
    num_threads = threading.active_count()
    with pytest.raises(TypeError, match="max_seqs"):
        AsyncLLM(target.folder, max_seqs=3)
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        AsyncLLM(target.folder, max_num_seqs=0)
    assert threading.active_count() == num_threads


# --- load -----------------------------------------------------------------------------------------


def test_a_load_of_requests(serve, built, folder, tmp_path, monkeypatch, capsys):
    """The benchmark in small, on the engine that is there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    load = importlib.import_module("load_async")
    path = tmp_path / "result.json"
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
