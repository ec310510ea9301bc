"""A connection of uvicorn, with limits on the time and the size of request headers.

uvicorn itself limits neither: a client could fill the memory with one endless header, or hold
connections without ever sending a request.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16  # of the request line and all headers, as in most servers


class Connection(HttpToolsProtocol):
    """See `HttpToolsProtocol`. The head of a request is its request line and its headers.

    A request whose head is larger than `MAX_HEAD_BYTES` gets status 400.

    Args:
        max_head_seconds: the maximum time to receive a head, from the start of the connection, or
            from the first byte of a later request. Then the connection is closed.
    """

    def __init__(self, *arguments: Any, max_head_seconds: float, **options: Any):
        super().__init__(*arguments, **options)
        self._max_head_seconds = max_head_seconds
        self._num_head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None  # runs while a head is expected

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._timer is None or self.transport.is_closing():
            self._num_head_bytes = 0
        elif self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The headers have more than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._end_head()
        super().on_headers_complete()

    def _begin_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._max_head_seconds, self._expire)

    def _end_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        self.transport.close()
