"""Passes outputs from the engine's thread to callers on event loops."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from typing import Any

from specjax.outputs import RequestOutput
from specjax.sampling_params import RequestOutputKind
from specjax.text.completions import Outputs, Shown


class OutputStream:
    """Passes the latest output of a request from the engine's thread to the request's caller."""

    def __init__(self, loop: asyncio.AbstractEventLoop, shown: Shown):
        self.loop, self._shown = loop, shown
        self.outputs: Outputs | None = None  # only the engine's thread uses this and `is_cancelled`
        self.is_cancelled = False
        self.is_finished = False
        self._latest: RequestOutput | None = None
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether all samples ended without an abort. Used on the engine's thread."""
        samples = [c.sequence for c in self.outputs.completions] if self.outputs else []
        return all(sample.finish_reason not in (None, "abort") for sample in samples)

    @property
    def is_due(self) -> bool:
        """Whether the request has outputs to return now. Used on the engine's thread."""
        return self.outputs is not None and self._shown.is_due(self.outputs)

    async def read(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield the growing output, in the form that `output_kind` sets, until it is complete."""
        while not self.is_finished:
            output = self._shown.of(await self.take())
            if output is not None:
                yield output

    async def take(self) -> RequestOutput:
        """Wait for the next output and return it."""
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

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._has_news.set()


class Generation:
    """A request that starts when it is iterated or awaited.

    Iterating yields the outputs of the request. Awaiting returns its last output.
    """

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
        """Abort the request, if it has started but not finished."""
        await self._outputs.aclose()

    async def _last(self) -> RequestOutput:
        (last,) = [one async for one in self._grow(RequestOutputKind.FINAL_ONLY)]
        return last


def tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function on an event loop. Do nothing if the loop has closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


def deliver(outputs: list[tuple[OutputStream, RequestOutput]]) -> None:
    """Put each output into its stream."""
    for stream, output in outputs:
        stream.put(output)
