"""A connection of uvicorn, with limits on request headers and on clients that read nothing.

Without these limits, a client could fill uvicorn's memory with one endless header, or hold
connections without ever sending a request or reading a response.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16  # of the request line and all headers, as in most servers


class Connection(HttpToolsProtocol):
    """See `HttpToolsProtocol`. The head of a request is its request line and its headers.

    A request whose head is larger than `MAX_HEAD_BYTES` gets status 400.

    Args:
        max_stall_seconds: the maximum time to receive a head, from the start of the connection, or
            from the first byte of a later request. Then the connection is closed. The connection is
            also closed if the client reads nothing for this time after a response is complete.
            (While a response is streamed, `Events` watches the client.)
    """

    def __init__(self, *arguments: Any, max_stall_seconds: float, **options: Any):
        super().__init__(*arguments, **options)
        self._max_stall_seconds = max_stall_seconds
        self._num_head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None  # runs while a head is expected
        self._num_unread = 0  # bytes of complete responses that the client had not read
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._begin_head()
        self._check_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._end_head()
        if self._watch is not None:
            self._watch.cancel()
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
            self._timer = self.loop.call_later(self._max_stall_seconds, self._expire)

    def _end_head(self) -> None:
        self._num_head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_reading(self) -> None:
        """Close the connection if the client has read no part of a response since the last call.

        Otherwise, schedule the next call. `Events` watches the client of a streamed response.
        """
        has_answered = self.cycle is None or self.cycle.response_complete
        is_over = has_answered or self.transport.is_closing()
        num_unread = self.transport.get_write_buffer_size() if is_over else 0
        if num_unread and num_unread == self._num_unread:
            self.transport.abort()
            return
        self._num_unread = num_unread
        self._watch = self.loop.call_later(self._max_stall_seconds, self._check_reading)

    def _expire(self) -> None:
        self._timer = None
        self.transport.close()
