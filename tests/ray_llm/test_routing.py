"""How a `RayLLM` joins the outputs of workers, and replaces dead workers. No worker is real."""

import asyncio
from types import SimpleNamespace

import pytest

from specjax import RayLLM, RequestOutput, RequestOutputKind, SamplingParams
from specjax.outputs import CompletionOutput
from specjax.ray import llm as module
from specjax.rl.ray_pool import WorkersDied
from specjax.rl.ray_worker import NotBuilt, WorkerFailed

PARAMS = SamplingParams(max_tokens=9, seed=0)


def output(*samples, finished=False):
    """Return an output in which each sample gains these tokens (None: nothing).

    The text of a token is its number.
    """
    reason = "length" if finished else None
    gained = [
        CompletionOutput(i, "".join(map(str, tokens)), list(tokens), None, None, reason, None)
        for i, tokens in enumerate(samples)
        if tokens is not None
    ]
    return RequestOutput("wire", None, [1], None, gained, finished)


class TaskError(Exception):
    """An error like Ray's `RayTaskError`. The workers raise its cause."""


class Workers:
    """A fake pool. `plan` has a list for each stream: the outputs or errors that it gives."""

    deaths = (ConnectionError, WorkerFailed)

    def __init__(self, *plan, num_workers=2):
        self.plan, self.calls, self.replaced = list(plan), [], []
        self.workers = [self._worker(i) for i in range(num_workers)]

    def _worker(self, number):
        def remote(prompt, params, request_id, before):
            known = None if before is None else (before.token_ids, before.text)
            self.calls.append((number, known))
            return self._stream(self.plan.pop(0))

        options = SimpleNamespace(remote=remote)
        return SimpleNamespace(stream=SimpleNamespace(options=lambda num_returns: options))

    async def _stream(self, events):
        for event in events:
            future = asyncio.get_running_loop().create_future()
            failed = isinstance(event, Exception)
            (future.set_exception if failed else future.set_result)(event)
            yield future
            await asyncio.sleep(0)

    def replace(self, number, worker):
        if self.workers[number] is worker:
            self.replaced.append(number)
            self.workers[number] = self._worker(number)

    def check_open(self):
        pass

    def call_first(self, *_):
        pass

    def call_all(self, _):
        return [SamplingParams()]


@pytest.fixture
def make(monkeypatch):
    ray = SimpleNamespace(
        nodes=list,
        remote=lambda cls: cls,
        cancel=lambda stream: None,
        exceptions=SimpleNamespace(RayTaskError=TaskError),
    )
    monkeypatch.setattr(module, "import_ray", lambda name: ray)

    def make(*plan, **options):
        workers = Workers(*plan, **options)
        monkeypatch.setattr(module, "WorkerPool", lambda *_, **__: workers)
        return RayLLM("folder", data_parallel_size=2), workers

    return make


def tokens_of(llm, params):
    async def run():
        return [one async for one in llm.generate_stream("prompt", params)]

    return [[(x.token_ids, x.text) for x in one.outputs] for one in asyncio.run(run())]


def test_a_request_continues_after_what_it_has(make):
    llm, workers = make(
        [output([1]), output([2, 3]), ConnectionError()],
        [WorkerFailed("half-way")],
        [output([4]), output([5], finished=True)],
    )
    found = tokens_of(llm, PARAMS)
    assert found == [[([*range(1, n + 1)], "12345"[:n])] for n in (1, 3, 4, 5)]
    assert [known for _, known in workers.calls] == [None, ([1, 2, 3], "123"), ([1, 2, 3], "123")]
    assert len(workers.replaced) == 2 and not +llm._num_samples


def test_samples_begin_from_the_start_and_are_shown_once(make):
    llm, workers = make(
        [output([1], [7]), output([2], None), ConnectionError()],
        [output([1], None), output([2], [7]), output([3], [8]), output([], [], finished=True)],
    )
    params = SamplingParams(n=2, max_tokens=9, output_kind=RequestOutputKind.DELTA)
    steps = [[[1], [7]], [[2]], [[3], [8]], [[], []]]
    found = [[tokens for tokens, _ in one] for one in tokens_of(llm, params)]
    assert [one for one in found if one] == steps
    assert [known for _, known in workers.calls] == [None, None]
    llm, _ = make([output([1], [7]), ConnectionError()], [output([1], [6])])
    with pytest.raises(RuntimeError, match="another gave other tokens"):
        tokens_of(llm, params)


def test_a_request_whose_workers_die_again_and_again_ends_and_others_do_not(make):
    error = NotBuilt(MemoryError("full"))
    deaths = [[ConnectionError()], [error], [ConnectionError("last")]]
    llm, workers = make(*deaths, num_workers=1)
    with pytest.raises(WorkersDied, match=r"3 workers died .* request 0 ran .*the last: last"):
        tokens_of(llm, PARAMS)
    assert workers.replaced == [0, 0]
    llm, workers = make([output([9]), ValueError("bad")], [output([1], finished=True)])
    failed, good = llm.generate(["a", "b"], PARAMS)
    assert failed.outputs[0].finish_reason == "error" and "bad" in str(failed.outputs[0].error)
    assert (failed.prompt, failed.request_id, failed.finished) == ("a", "0", True)
    assert good.outputs[0].token_ids == [1] and good.request_id == "1"
    assert sorted(number for number, _ in workers.calls) == [0, 1]  # each has one
    llm, _ = make([ValueError("bad")], [ValueError("bad")])
    with pytest.raises(ValueError, match="bad"):
        llm.generate(["a", "b"], PARAMS)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"data_parallel_size": 0}, "data_parallel_size=0 must be an integer of at least 1"),
        ({"model": 3}, "model=int must be a folder or hub id"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        RayLLM(**{"model": "folder", "data_parallel_size": 2} | options)
