"""An engine for asyncio. A background thread runs the steps of all callers' requests."""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from specjax.checks import check_positive
from specjax.config import EngineConfig
from specjax.device.models.model import Model
from specjax.engine.metrics import Metrics
from specjax.engine.process import refuse_fork
from specjax.engine_args import EngineArgs
from specjax.host.request import Request
from specjax.host.sequence import Sequence as Sample
from specjax.llm import LLM
from specjax.outputs import CompletionOutput, RequestOutput
from specjax.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputs
from specjax.serving.corpora import AsyncCorpusMethods
from specjax.serving.vllm_methods import Refusing
from specjax.text.completions import Shown
from specjax.text.prompts import Prompt, prompt_text, refuse_lora
from specjax.text.streams import Generation, OutputStream, deliver, tell
from specjax.text.tokenizer import ChatTokenizer

Answer = TypeVar("Answer")
CLOSED = "this AsyncLLM is closed; build a new one"


class AsyncLLM(AsyncCorpusMethods, Refusing):
    """An `LLM` for asyncio: `async for output in llm.generate_stream(prompt, params)`.

    A background thread runs the engine, so that no call blocks the event loop. All methods must be
    called on the same event loop.

    Args:
        model: as for `LLM`. All other options of `LLM` are accepted, too; verbose defaults to
            False.
        max_num_requests: maximum number of requests in the engine at a time. Further requests wait
            outside the engine, in order of arrival. While they wait there, they cannot be aborted
            by id, and their priority has no effect. None for no limit.

    Raises:
        ValueError: as for `LLM`.
        CheckpointError: as for `LLM`.
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
        self._streams: dict[Hashable, OutputStream] = {}  # used by the engine's thread only
        self.stops: set[str] = set()  # reasons to run no step; changed by functions in `apply`
        self._is_closing, self._pid = False, os.getpid()
        self._ending, self._has_ended = threading.Lock(), False  # once True, refuse calls
        self._thread = threading.Thread(target=self._serve, name="specjax-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "AsyncLLM":
        """Build an AsyncLLM with the options in `engine_args`, as in vLLM."""
        return cls(**vars(engine_args))

    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: Hashable | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt. Yield an output whenever new tokens have arrived.

        `SamplingParams.output_kind` sets what each output holds, by default everything so far. The
        last output is `finished`. A slow consumer gets fewer outputs, without losing tokens:
        outputs are merged instead of queued, and the last output is always yielded. Leaving the
        iteration, or cancelling its task, aborts the request.

        Args:
            prompt: one prompt, as for `LLM.generate`.
            sampling_params: None for `LLM.get_default_sampling_params`.
            request_id: an id for `abort`, unique among unfinished requests; None for a new id.
            priority: with scheduling_policy="priority", the request with the lowest value goes
                first.

        Raises:
            ValueError: the prompt, a parameter or the id is invalid.
            RuntimeError: the AsyncLLM is closed or asleep.
        """
        return self._grow(prompt, sampling_params, request_id, priority, None)

    def resume_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        before: CompletionOutput,
        *,
        request_id: Hashable | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a request that another engine has begun. The request must have a single sample.

        `before` is the sample's last output from the other engine. Yield later outputs as in
        `generate_stream`; cumulative outputs include `before`.

        Raises:
            ValueError: as for `generate_stream`, or the parameters ask for several samples.
            RuntimeError: as for `generate_stream`.
        """
        return self._grow(prompt, sampling_params, request_id, priority, None, before)

    async def _grow(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: Hashable | None,
        priority: int,
        kind: RequestOutputKind | None,  # None for the kind of `params`
        before: CompletionOutput | None = None,  # what the only sample already has
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_open()
        if params is None:
            params = self._llm.get_default_sampling_params()
        known = [] if before is None else before.token_ids

        def make() -> Request:
            made = self._llm.make_request(prompt, params, request_id=request_id, priority=priority)
            return self._llm.request_maker.after(made, known)

        request = await asyncio.wrap_future(self._call(make))
        text, shown = prompt_text(prompt), Shown(kind or request.params.output_kind, before)
        async with self._turns:
            self._check_open()  # it may have closed meanwhile
            stream = OutputStream(asyncio.get_running_loop(), shown)
            added = self._call(lambda: self._add(stream, request, text, before))
            try:
                await asyncio.wrap_future(added)
                async for output in stream.read():
                    yield output
            finally:
                self._leave(stream)

    @asynccontextmanager
    async def submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams,
        *,
        request_ids: Sequence[Hashable],
        priority: int = 0,
    ) -> AsyncIterator[list[AsyncIterator[RequestOutput]]]:
        """Queue all prompts, and yield a stream for each. If any prompt is invalid, queue none.

        Use this in an `async with` statement, whose end aborts unfinished requests. The streams are
        as in `generate_stream`. `max_num_requests` has no effect.

        Args:
            request_ids: an id per prompt, as in `generate_stream`.

        Raises:
            ValueError: a prompt, a parameter or an id is invalid.
            RuntimeError: the AsyncLLM is closed or asleep.
        """
        self._check_open()
        loop, kind = asyncio.get_running_loop(), sampling_params.output_kind
        streams = [OutputStream(loop, Shown(kind)) for _ in prompts]
        make = partial(self._llm.make_request, sampling_params=sampling_params, priority=priority)

        def add() -> None:
            pairs = zip(prompts, request_ids, strict=True)
            requests = [make(prompt, request_id=one) for prompt, one in pairs]
            for stream, request, prompt in zip(streams, requests, prompts, strict=True):
                self._add(stream, request, prompt_text(prompt))

        try:
            await asyncio.wrap_future(self._call(add))
            yield [stream.read() for stream in streams]
        finally:
            for stream in streams:
                self._leave(stream)

    def _leave(self, stream: OutputStream) -> None:
        """Abort a request, unless it has finished or was never added."""
        if not stream.is_finished and not self._is_closing:
            self._call(partial(self._drop, stream))

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: Hashable | None = None,
        *,
        lora_request: None = None,
        priority: int = 0,
    ) -> Generation:
        """Continue a prompt. `async for` yields its outputs, and `await` returns the whole output.

        The arguments are as for `generate_stream`. lora_request must be None.

        Raises:
            ValueError: a lora_request is given. Iterating or awaiting raises all other errors.
        """
        refuse_lora(lora_request)
        return Generation(partial(self._grow, prompt, sampling_params, request_id, priority))

    async def abort(self, request_id: Hashable) -> bool:
        """Abort a request. The request's last output has the tokens generated so far.

        Return False if no unfinished request has this id.
        """
        return await self._ask(self._abort, request_id)

    def metrics(self) -> Metrics:
        """Return the engine's metrics, such as the number of tokens since the engine was built."""
        self._check_open()
        return self._llm.metrics()

    def get_tokenizer(self) -> ChatTokenizer:
        """See `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """See `LLM.get_default_sampling_params`."""
        return self._llm.get_default_sampling_params()

    @property
    def config(self) -> EngineConfig:
        """The sizes and modes of the engine, or of a single replica if there are several."""
        return self._llm.engine.config

    @property
    def num_slots(self) -> int:
        """The maximum number of samples that run at the same time."""
        return len(self._llm.engine.engines) * self.config.max_num_seqs

    @property
    def num_speculative_tokens(self) -> int:
        """The maximum number of drafts per round; 0 without speculation."""
        return max(self._llm.engine.engines[0].scheduler.policy.choices)

    def is_alive(self) -> bool:
        """Return whether the engine accepts requests. False if closed, or after a fatal error."""
        return self._thread.is_alive() and not self._is_closing

    async def compile_grammar(self, outputs: StructuredOutputs) -> None:
        """Compile the grammar of `outputs` outside the engine's thread, so that no request waits.

        Raises:
            ValueError: `outputs` gives no valid grammar, or the checkpoint has no tokenizer.
        """
        if (grammars := self._llm.request_maker.grammars) is None:
            raise ValueError("structured_outputs need a checkpoint with a tokenizer")
        await asyncio.to_thread(grammars.compile, outputs)

    async def save_dynamic_config(self, path: str | Path) -> None:
        """See `LLM.save_dynamic_config`."""
        await self._ask(self._llm.save_dynamic_config, path)

    async def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`."""
        return await self._ask(self._llm.reset_prefix_cache)

    async def sleep(self, level: int = 1) -> None:
        """Free device memory until `wake_up`; see `LLM.sleep`. All requests must have finished."""
        await self._ask(self._llm.sleep, level)

    async def wake_up(self) -> None:
        """See `LLM.wake_up`."""
        await self._ask(self._llm.wake_up)

    async def is_sleeping(self) -> bool:
        """Return whether the engine is asleep (see `LLM.sleep`)."""
        return await self._ask(self._llm.is_sleeping)

    async def start_profile(self, profile_prefix: str = "specjax-profile") -> None:
        """See `LLM.start_profile`."""
        await self._ask(self._llm.start_profile, profile_prefix)

    async def stop_profile(self) -> None:
        """See `LLM.stop_profile`."""
        await self._ask(self._llm.stop_profile)

    def apply(self, function: Callable[[LLM], Answer]) -> "Future[Answer]":
        """Call `function` with the LLM on the engine's thread, between two steps.

        During the call, no step is in flight. Return the future of the function's result.
        """

        def call() -> Answer:
            self._advance(self._llm.engine.land)
            return function(self._llm)

        self._check_open()
        return self._call(call)

    async def close(self) -> None:
        """Abort unfinished requests and free the device's memory. Closing twice is harmless."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """Run `close` synchronously. Pending iterations end once the event loop runs again."""
        self._is_closing = True
        self._calls.put(lambda: None)
        self._thread.join()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    def _check_open(self) -> None:
        refuse_fork(self._pid)
        if self._is_closing:
            raise RuntimeError(CLOSED)

    async def _ask(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Run a function on the engine's thread between two steps, and return its result."""
        self._check_open()
        return await asyncio.wrap_future(self._call(partial(function, *arguments)))

    def _call(self, function: Callable[[], Any]) -> Future:
        """Schedule a function on the engine's thread between two steps, and return its future."""
        future: Future = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        with self._ending:
            if self._has_ended:
                future.set_exception(RuntimeError(CLOSED))
            else:
                self._calls.put(call)
        return future

    # The methods below run on the engine's thread.

    def _serve(self) -> None:
        error: BaseException = RuntimeError("this AsyncLLM was closed before the request started")
        try:
            self._run()
            for request_id in list(self._streams):
                self._abort(request_id)
        except BaseException as failure:  # even outside a step, the engine cannot go on
            error, self._is_closing = failure, True
        with self._ending:
            self._has_ended = True
            while not self._calls.empty():  # calls from before it closed
                self._calls.get()()
        self._fail_all(error)
        self._llm.close()

    def _run(self) -> None:
        """Run steps until the LLM closes. Between steps, run the functions that `_call` queued."""
        engine = self._llm.engine
        while not self._is_closing:
            while not self._calls.empty() or self.stops or not engine.has_work:
                self._calls.get()()
                if self._is_closing:
                    break
            if not self._is_closing and engine.has_work:
                self._advance(engine.step)

    def _advance(self, move: Callable[[], list[Sample]]) -> None:
        """Call `move`, for example `Engine.step`, and deliver the samples that `move` returns.

        If `move` fails, reset the engine, and fail all unfinished requests.
        """
        try:
            touched = move()
        except Exception as error:  # the device failed, all running requests are lost
            finished = [i for i, s in self._streams.items() if s.has_ended]
            self._llm.engine.reset()
            self._publish(finished)
            self._fail_all(error)
        else:
            self._publish({sequence.request.request_id for sequence in touched})

    def _add(
        self,
        stream: OutputStream,
        request: Request,
        prompt: str | None,
        before: CompletionOutput | None = None,
    ) -> None:
        if not stream.is_cancelled:
            outputs = stream.outputs = self._llm.start(request, prompt)
            self._streams[request.request_id] = stream
            if before is not None:
                (completion,) = outputs.completions
                completion.sequence.logprobs += before.logprobs or []
                completion.sequence.rounds += before.rounds

    def _abort(self, request_id: Hashable) -> bool:
        aborted = self._llm.engine.abort(request_id)
        self._publish({request_id} if aborted else ())
        return bool(aborted)

    def _drop(self, stream: OutputStream) -> None:
        """Abort a request whose caller stopped waiting."""
        stream.is_cancelled = True
        if stream.outputs is None:
            return
        # Once a request has ended, another request may have taken its id.
        request_id = stream.outputs.request.request_id
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
        if not stream.outputs.is_finished:
            self._llm.engine.abort(request_id)

    def _publish(self, request_ids: Any) -> None:
        """Deliver the new outputs of requests. An event loop gets all its outputs in one call."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, RequestOutput]]] = {}
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is None or stream.outputs is None or not stream.is_due:
                continue
            try:
                output = stream.outputs.output()
            except Exception as error:  # only this request fails
                self._drop(stream)
                tell(stream.loop, stream.fail, error)
                continue
            news.setdefault(stream.loop, []).append((stream, output))
            if output.finished:
                del self._streams[request_id]
        for loop, outputs in news.items():
            tell(loop, deliver, outputs)

    def _fail_all(self, error: BaseException) -> None:
        for stream in self._streams.values():
            tell(stream.loop, stream.fail, error)
        self._streams.clear()
