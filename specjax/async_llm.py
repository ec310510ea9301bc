"""Many callers, one engine: requests come and go while a thread keeps the device busy."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Hashable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from specjax.checks import check_positive
from specjax.device.models.model import Model
from specjax.engine.metrics import Metrics
from specjax.engine_args import EngineArgs
from specjax.host.request import Request
from specjax.llm import LLM
from specjax.outputs import RequestOutput
from specjax.sampling_params import RequestOutputKind, SamplingParams
from specjax.text.completions import Outputs, Shown
from specjax.text.prompts import Prompt, prompt_text, refuse_lora
from specjax.text.tokenizer import ChatTokenizer

Answer = TypeVar("Answer")


class AsyncLLM:
    """An `LLM` for asyncio: `async for output in llm.generate_stream(prompt, params)`.

    A thread of its own runs the engine, so the event loop is never blocked by it. Every method
    belongs to the event loop on which the first one was called.

    Args:
        model: as for `LLM`, with all its options; verbose is False unless told.
        max_num_requests: most requests that the engine is given at a time; further callers wait
            for their turn, first come, first served, and until then neither `abort` nor priorities
            know of them. None for any number.

    Raises:
        ValueError: as `LLM`.
        CheckpointError: as `LLM`.
    """

    def __init__(
        self, model: str | Path | Model, *, max_num_requests: int | None = None, **options: Any
    ):
        if max_num_requests is not None:
            check_positive(max_num_requests=max_num_requests)
        options.setdefault("verbose", False)
        self._llm = LLM(model, **options)
        self._turns = nullcontext()
        if max_num_requests is not None:
            self._turns = asyncio.Semaphore(max_num_requests)
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[Hashable, _Stream] = {}  # the engine thread's
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="specjax-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "AsyncLLM":
        """An AsyncLLM of these options, as with vLLM."""
        return cls(**vars(engine_args))

    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: Hashable | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt; an output comes whenever it has grown.

        It holds what `SamplingParams.output_kind` says: by default all of it each time. The
        last one is `finished`. Whoever is slow is given fewer, never less: the last one always
        comes, and deltas together are the whole, so that nothing piles up. Leaving the iteration,
        or cancelling its task, aborts the request.

        Args:
            prompt: as for `LLM.generate`, one.
            sampling_params: None for `LLM.get_default_sampling_params`.
            request_id: a name for `abort`, unlike those of all unfinished requests.
            priority: with scheduling_policy="priority", the lowest goes first.

        Raises:
            ValueError: a prompt, parameters or an id that cannot be served.
            RuntimeError: the AsyncLLM is closed.
        """
        return self._grow(prompt, sampling_params, request_id, priority, None)

    async def _grow(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: Hashable | None,
        priority: int,
        kind: RequestOutputKind | None,  # None for the parameters' own
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_open()
        if params is None:
            params = self._llm.get_default_sampling_params()
        made = self._call(
            lambda: self._llm.make_request(prompt, params, request_id=request_id, priority=priority)
        )
        request = await asyncio.wrap_future(made)
        text, shown = prompt_text(prompt), Shown(kind or request.params.output_kind)
        async with self._turns:
            self._check_open()  # it may have closed meanwhile
            stream = _Stream(asyncio.get_running_loop())
            added = self._call(lambda: self._add(stream, request, text))
            try:
                await asyncio.wrap_future(added)
                while not stream.is_finished:
                    output = shown.of(await stream.take())
                    if output is not None:
                        yield output
            finally:
                # After the end it is a no-op; before, the request may not even have been added.
                if not stream.is_finished and not self._is_closing:
                    self._call(lambda: self._drop(stream))

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: Hashable | None = None,
        *,
        lora_request: None = None,
        priority: int = 0,
    ) -> "Generation":
        """Continue a prompt: `async for` gives it as it grows, `await` once it has finished.

        See `generate_stream`.

        Raises:
            ValueError: a lora_request; the others come when it is iterated or awaited.
        """
        refuse_lora(lora_request)
        return Generation(partial(self._grow, prompt, sampling_params, request_id, priority))

    async def abort(self, request_id: Hashable) -> bool:
        """End a request with what it has; False if there is no such request."""
        return await self._ask(self._abort, request_id)

    def metrics(self) -> Metrics:
        """Counters since the engine was built."""
        self._check_open()
        return self._llm.metrics()

    def get_tokenizer(self) -> ChatTokenizer:
        """See `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    async def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`."""
        return await self._ask(self._llm.reset_prefix_cache)

    async def sleep(self, level: int = 1) -> None:
        """See `LLM.sleep`, which refuses while requests run."""
        await self._ask(self._llm.sleep, level)

    async def wake_up(self) -> None:
        """See `LLM.wake_up`."""
        await self._ask(self._llm.wake_up)

    async def is_sleeping(self) -> bool:
        """Whether `sleep` freed memory that `wake_up` has not taken back."""
        return await self._ask(self._llm.is_sleeping)

    async def start_profile(self, profile_prefix: str = "specjax-profile") -> None:
        """See `LLM.start_profile`."""
        await self._ask(self._llm.start_profile, profile_prefix)

    async def stop_profile(self) -> None:
        """See `LLM.stop_profile`."""
        await self._ask(self._llm.stop_profile)

    async def close(self) -> None:
        """Abort what has not finished and free the device's memory; closing twice is harmless."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """`close`, for where nothing can be awaited; what waits for outputs learns of it later."""
        self._is_closing = True
        self._calls.put(lambda: None)
        self._thread.join()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._is_closing:
            raise RuntimeError("this AsyncLLM is closed; build a new one")

    async def _ask(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """What a function gives, called by the engine's thread between two steps."""
        self._check_open()
        return await asyncio.wrap_future(self._call(partial(function, *arguments)))

    def _call(self, function: Callable[[], Any]) -> Future:
        """Have the engine's thread call a function between two steps."""
        future: Future = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        self._calls.put(call)
        return future

    # What follows runs on the engine's thread.

    def _serve(self) -> None:
        engine = self._llm.engine
        while not self._is_closing:
            while not self._calls.empty() or not engine.has_work:
                self._calls.get()()
                if self._is_closing:
                    break
            if not self._is_closing and engine.has_work:
                try:
                    touched = engine.step()
                except Exception as error:  # of the device, which ended all that ran
                    finished = [i for i, s in self._streams.items() if s.has_ended]
                    engine.reset()
                    self._publish(finished)
                    self._fail_all(error)
                else:
                    self._publish({sequence.request.request_id for sequence in touched})
        for request_id in list(self._streams):
            self._abort(request_id)
        while not self._calls.empty():  # of callers that did not see it close
            self._calls.get()()
        self._fail_all(RuntimeError("this AsyncLLM was closed before the request started"))
        self._llm.close()

    def _add(self, stream: "_Stream", request: Request, prompt: str | None) -> None:
        if not stream.is_cancelled:
            stream.outputs = self._llm.start(request, prompt)
            self._streams[request.request_id] = stream

    def _abort(self, request_id: Hashable) -> bool:
        aborted = self._llm.engine.abort(request_id)
        self._publish({request_id} if aborted else ())
        return bool(aborted)

    def _drop(self, stream: "_Stream") -> None:
        """Abort a request whose caller has gone."""
        stream.is_cancelled = True
        if stream.outputs is not None:
            request_id = stream.outputs.request.request_id
            self._streams.pop(request_id, None)
            self._llm.engine.abort(request_id)

    def _publish(self, request_ids: Any) -> None:
        """Hand the outputs that have grown to those who wait for them, in one call per loop."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is None or stream.outputs is None:
                continue
            try:
                output = stream.outputs.output()
            except Exception as error:  # of this request alone
                self._drop(stream)
                _tell(stream.loop, stream.fail, error)
                continue
            news.setdefault(stream.loop, []).append((stream, output))
            if output.finished:
                del self._streams[request_id]
        for loop, outputs in news.items():
            _tell(loop, _deliver, outputs)

    def _fail_all(self, error: Exception) -> None:
        for stream in self._streams.values():
            _tell(stream.loop, stream.fail, error)
        self._streams.clear()


class Generation:
    """A request that begins when it is iterated, for its outputs, or awaited, for its last one."""

    def __init__(
        self, grow: Callable[[RequestOutputKind | None], AsyncGenerator[RequestOutput, None]]
    ):
        self._grow = grow
        self._outputs = grow(None)

    def __aiter__(self) -> AsyncGenerator[RequestOutput, None]:
        return self._outputs

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._last().__await__()

    async def aclose(self) -> None:
        """Abort the request if it has been iterated and has not finished."""
        await self._outputs.aclose()

    async def _last(self) -> RequestOutput:
        (last,) = [one async for one in self._grow(RequestOutputKind.FINAL_ONLY)]
        return last


class _Stream:
    """The latest output of a request, on its way from the engine's thread to its caller."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.outputs: Outputs | None = None  # the engine thread's, as is the next
        self.is_cancelled = False
        self.is_finished = False
        self._latest: RequestOutput | None = None
        self._error: Exception | None = None
        self._has_news = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether the request ended by itself; asked on the engine's thread."""
        samples = [c.sequence for c in self.outputs.completions] if self.outputs else []
        return all(sample.finish_reason not in (None, "abort") for sample in samples)

    async def take(self) -> RequestOutput:
        """The next output, once there is one."""
        await self._has_news.wait()
        self._has_news.clear()
        if self._error is not None:
            self.is_finished = True
            raise self._error
        assert self._latest is not None
        self.is_finished = self._latest.finished
        return self._latest

    def put(self, output: RequestOutput) -> None:
        self._latest = output
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._has_news.set()


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function on a loop, unless it has closed and nobody waits any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


def _deliver(outputs: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in outputs:
        stream.put(output)
