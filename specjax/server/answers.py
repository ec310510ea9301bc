"""Runs a request's prompts on the engine, and sends the response, whole or as a stream of events.

A stream (server-sent events) has one event per sample and engine step. If the client reads slowly,
the outputs of several steps are merged into one event, so that no events queue up.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from specjax.outputs import CompletionOutput, RequestOutput
from specjax.server.admission import RETRY_SECONDS
from specjax.server.errors import INTERNAL, APIError
from specjax.server.events import ClientStalledError, Events, together, unless_left
from specjax.server.jobs import Job
from specjax.server.parameters import of_value
from specjax.server.request_metrics import request_metrics
from specjax.server.service import Service
from specjax.server.wire import CachedTokens, Reply, Usage

_LOG = logging.getLogger("specjax")
_ENCODER = msgspec.json.Encoder()


class Answer:
    """An ASGI app that runs a job, and sends the response to the job's request."""

    def __init__(self, service: Service, job: Job):
        self._service, self._job = service, job
        self._numbers = {"prompt": 0, "cached": 0, "completion": 0}
        self._counted: set[int] = set()  # prompts whose tokens have been counted
        self._num_old = max(
            0, len(service.versions) - 1
        )  # versions of the weights before the request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        monitor = self._service.monitor
        monitor.num_open += 1
        try:
            await unless_left(receive, self._run(send))
        finally:
            monitor.num_open -= 1

    async def _run(self, send: Send) -> None:
        job, settings = self._job, self._service.settings
        if settings.enable_log_requests:
            for request_id, prompt in zip(job.ids, job.prompts, strict=True):
                text = str(prompt.get("prompt", prompt["prompt_token_ids"]))
                shown = text[: settings.max_log_len]
                _LOG.info("%s: %s, prompt %r", request_id, job.params, shown)
        with self._service.admission.admit(len(job.prompts) * job.params.n), self._time_limit():
            async with self._queued() as streams:
                await (self._stream if job.request.stream else self._whole)(streams, send)

    @asynccontextmanager
    async def _queued(self) -> AsyncIterator[list[AsyncIterator[RequestOutput]]]:
        job, priority = self._job, self._job.request.priority or 0
        queued = self._service.llm.submit(
            job.prompts, job.params, request_ids=job.ids, priority=priority
        )
        async with AsyncExitStack() as stack:
            try:
                streams = await stack.enter_async_context(queued)
            except ValueError as error:
                raise self._refusal(error) from None
            except RuntimeError as error:
                _LOG.warning("%s is refused: %s", job.id, error)
                text = "the engine is asleep or has ended"
                raise APIError(503, text, retry_after=RETRY_SECONDS) from None
            yield streams

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        """Abort this job's samples if the `with` block takes longer than `max_request_seconds`.

        The samples then end with their tokens so far.
        """
        limit, loop = self._service.limits.max_request_seconds, asyncio.get_running_loop()
        if limit is None:
            yield
            return
        aborts: list[asyncio.Task] = []
        timer = loop.call_later(limit, lambda: aborts.append(loop.create_task(self._abort())))
        try:
            yield
        finally:
            timer.cancel()

    async def _abort(self) -> None:
        _LOG.warning("%s takes too long and ends (--max-request-seconds)", self._job.id)
        for request_id in self._job.ids:
            await self._service.llm.abort(request_id)

    def _refusal(self, error: ValueError) -> APIError:
        """Return the error for a request that the engine refuses."""
        text = str(error)
        for name in self._job.ids:
            text = text.removeprefix(f"request {name!r}: ").replace(
                f"request {name!r}", "the prompt"
            )
        text = self._service.public(text)
        return of_value(ValueError(text), self._job.request, self._job.prompt_field)

    async def _whole(self, streams: Sequence[AsyncIterator[RequestOutput]], send: Send) -> None:
        outputs = await together([self._last(stream) for stream in streams])
        for i, output in enumerate(outputs):
            self._check(output.outputs)
            self._count(i, output)
            self._service.monitor.finish(output, self._job.params)
        params = self._job.params
        if params.logprobs is None and params.prompt_logprobs is None:
            body = self._encode_whole(outputs)
        else:  # it may take long
            body = await asyncio.to_thread(self._encode_whole, outputs)
        headers = [(b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _encode_whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        form = self._job.form
        choices = [one for i, output in enumerate(outputs) for one in form.wholes(i, output)]
        reply = self._reply(form.whole_object, choices)
        reply.usage = self._usage()
        for name, value in form.extras(outputs).items():
            setattr(reply, name, value)
        reply.metrics = self._metrics(outputs)
        return _ENCODER.encode(reply)

    async def _last(self, stream: AsyncIterator[RequestOutput]) -> RequestOutput:
        (output,) = [one async for one in stream]
        return output

    async def _stream(self, streams: Sequence[AsyncIterator[RequestOutput]], send: Send) -> None:
        events = Events(send, self._service.limits.max_stall_seconds)
        await events.start()
        try:
            async with events.unless_stalled():
                await self._send_events(streams, events)
        except ClientStalledError:
            _LOG.warning("the client of %s does not read; its request ends", self._job.id)

    async def _send_events(
        self, streams: Sequence[AsyncIterator[RequestOutput]], events: Events
    ) -> None:
        service, job = self._service, self._job
        wants = job.request.stream_options
        has_usage = service.settings.enable_force_include_usage or (wants and wants.include_usage)
        try:
            async with events.kept_alive(service.settings.sse_keep_alive_interval):
                pumps = [self._pump(i, one, events) for i, one in enumerate(streams)]
                outputs = await together(pumps)
                if has_usage:
                    reply = self._reply(job.form.chunk_object, [])
                    reply.usage, reply.metrics = self._usage(), self._metrics(outputs)
                    await events.put(_ENCODER.encode(reply))
            await events.end()
        except APIError as error:
            await events.put(error.encode())
            await events.end()
        except Exception:  # the engine failed
            _LOG.exception("%s failed", job.id)
            await events.put(APIError(500, INTERNAL).encode())
            await events.end()

    async def _pump(
        self, prompt: int, stream: AsyncIterator[RequestOutput], events: Events
    ) -> RequestOutput:
        """Send the events of one prompt until it is finished. Return its last output."""
        form, wants = self._job.form, self._job.request.stream_options
        is_counted = wants is not None and wants.continuous_usage_stats
        latest, output = None, None
        async for output in stream:
            now = time.monotonic()
            if latest is None:  # not earlier: clients measure the time to the first event
                for choice in form.openings(prompt):
                    await self._put(choice, events, is_counted=is_counted)
            else:
                self._service.monitor.observe("inter_token_latency_seconds", now - latest)
            latest = now
            self._check(output.outputs)
            self._count(prompt, output)
            for choice in form.parts(prompt, output):
                await self._put(choice, events, is_counted=is_counted)
        assert output is not None
        self._service.monitor.finish(output, self._job.params)
        return output

    async def _put(self, choice: Any, events: Events, *, is_counted: bool | None) -> None:
        reply = self._reply(self._job.form.chunk_object, [choice])
        if is_counted:
            reply.usage = self._usage()
        await events.put(_ENCODER.encode(reply))

    def _reply(self, kind: str, choices: list[Any]) -> Reply:
        job = self._job
        versions = self._service.versions[self._num_old :] or msgspec.UNSET
        return Reply(
            id=job.id,
            object=kind,
            created=job.created,
            model=job.model,
            choices=choices,
            weight_versions=versions,
        )

    def _check(self, samples: Sequence[CompletionOutput]) -> None:
        """Raise an APIError if one of the samples failed."""
        for sample in samples:
            if isinstance(sample.error, ValueError):  # parameters that leave no token
                raise APIError(422, self._service.public(str(sample.error)))
            if sample.error is not None:
                _LOG.error("%s failed: %s", self._job.id, sample.error)
                raise APIError(500, INTERNAL)

    def _count(self, prompt: int, output: RequestOutput) -> None:
        numbers = self._numbers
        if prompt not in self._counted:
            self._counted.add(prompt)
            numbers["prompt"] += len(output.prompt_token_ids)
            numbers["cached"] += output.num_cached_tokens or 0
        numbers["completion"] += sum(len(one.token_ids) for one in output.outputs)

    def _usage(self) -> Usage:
        prompt, completion = self._numbers["prompt"], self._numbers["completion"]
        cached = CachedTokens(self._numbers["cached"])
        details = self._job.form.token_details()
        return Usage(prompt, prompt + completion, completion, cached, details)

    def _metrics(self, outputs: Sequence[RequestOutput]) -> dict[str, Any] | msgspec.UnsetType:
        if len(outputs) > 1 or self._job.params.n > 1 or outputs[0].metrics is None:
            return msgspec.UNSET
        found = request_metrics(
            outputs[0].metrics, self._service.settings, self._service.llm.num_speculative_tokens
        )
        return found or msgspec.UNSET
