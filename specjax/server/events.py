"""Sends server-sent events, and notices clients that disconnect or stop reading."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive, Send

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not hold events back
]


class ClientStalledError(Exception):
    """Raised if the client stopped reading for too long."""


class Events:
    """Sends the events of one response.

    If the client does not read, sending waits for it, so no events queue up.

    Args:
        max_stall: seconds that sending may wait for the client; `unless_stalled` enforces this.
    """

    def __init__(self, send: Send, max_stall: float):
        self._send, self._max_stall = send, max_stall
        self._num_sent = 0
        self._blocked_since: float | None = None  # start of a send that waits

    async def start(self) -> None:
        """Send the headers."""
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def put(self, data: bytes) -> None:
        """Send an event."""
        await self._write(b"data: " + data + b"\n\n")

    async def end(self) -> None:
        """Send the last event."""
        await self._write(b"data: [DONE]\n\n", is_last=True)

    @asynccontextmanager
    async def kept_alive(self, interval: float) -> AsyncIterator[None]:
        """Within the block, send a comment after `interval` seconds without events.

        An interval of 0 means no comments.
        """
        if not interval:
            yield
            return
        task = asyncio.create_task(self._comment(interval))
        try:
            yield
        finally:
            task.cancel()

    async def _comment(self, interval: float) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(interval)
            if self._num_sent == num_sent:
                await self._write(b":\n\n")

    @asynccontextmanager
    async def unless_stalled(self) -> AsyncIterator[None]:
        """Run a block; raise ClientStalledError when sending has waited for `max_stall` seconds.

        One timer for the whole block is cheaper than a timeout for each event.
        """
        loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)

        def check() -> None:
            nonlocal timer
            now, since = loop.time(), self._blocked_since
            end = self._max_stall + (now if since is None else since)
            if end <= now:
                limit.reschedule(now)
            else:
                timer = loop.call_at(end, check)

        timer = loop.call_later(self._max_stall, check)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise ClientStalledError from None
            raise
        finally:
            timer.cancel()

    async def _write(self, body: bytes, *, is_last: bool = False) -> None:
        self._num_sent += 1
        if self._blocked_since is None:
            self._blocked_since = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._blocked_since = None


async def unless_left(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, but cancel it when the client closes its connection."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_end(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def together(works: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines at the same time, and return their results. If one fails, cancel the rest."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
