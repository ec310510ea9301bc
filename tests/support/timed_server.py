"""An OpenAI server that sends given numbers of tokens at given times, and may die."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODELS = {"data": [{"id": "timed", "owned_by": "test"}]}


@dataclass
class TimedServer:
    """A server that answers each request with chunks of text.

    Attributes:
        seconds: the pause before each chunk.
        tokens: the number of tokens in each chunk.
        dies_at: the number of the request during which the server dies; None if it does not.
        best: the log-probabilities, by token id, that the server reports if asked.
        bodies: the time of arrival and the body of each request.
    """

    seconds: list[float]
    tokens: list[int]
    dies_at: int | None = None
    status: int = 200
    counts: bool = True  # tokens in each chunk, not only at the end
    best: dict[int, float] = field(default_factory=dict)
    bodies: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    port: int = 0
    server: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, reader: Any, writer: Any) -> None:
        path = head.split()[1]
        if not path.endswith("completions"):
            found = json.dumps(MODELS).encode() if path in ("/v1/models", "/health") else b"{}"
            status = "404 Not Found" if path == "/metrics" else "200 OK"
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(found)}\r\n\r\n".encode())
            writer.write(found)
            return
        length = next(
            int(line.partition(":")[2])
            for line in head.split("\r\n")
            if line.lower().startswith("content-length")
        )
        body = json.loads(await reader.readexactly(length))
        number = len(self.bodies)
        self.bodies.append((time.perf_counter(), body))
        if "logprobs" in body:
            top = {f"token_id:{token}": score for token, score in self.best.items()}
            found = json.dumps({"choices": [{"logprobs": {"top_logprobs": [top]}}]}).encode()
            kind = b"content-type: application/json\r\n"
            size = f"content-length: {len(found)}\r\n\r\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\n" + kind + size + found)
            return
        if self.status != 200:
            error = json.dumps({"error": {"message": "too long for this model"}}).encode()
            writer.write(
                f"HTTP/1.1 400 Bad\r\ncontent-length: {len(error)}\r\n\r\n".encode() + error
            )
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        done, prompt = 0, len(body.get("prompt", body.get("messages", "")))
        for gap, count in zip(self.seconds, self.tokens, strict=True):
            await asyncio.sleep(gap)
            if number == self.dies_at and done:
                self.server.close()
                writer.transport.abort()
                return
            done += count
            usage = {"prompt_tokens": prompt, "completion_tokens": done} if self.counts else None
            self._send(writer, {"choices": [{"text": "x" * count}], "usage": usage})
            await writer.drain()
        usage = {"prompt_tokens": prompt, "completion_tokens": done}
        self._send(writer, {"choices": [], "usage": usage})
        self._write(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _send(self, writer: Any, value: dict[str, Any]) -> None:
        self._write(writer, b"data: " + json.dumps(value).encode() + b"\n\n")

    def _write(self, writer: Any, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def timed_server(**options: Any) -> Iterator[TimedServer]:
    """Run a `TimedServer` in a thread inside the `with` block."""
    made, ready, loop = TimedServer(**options), threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        made.server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
        made.port = made.server.sockets[0].getsockname()[1]

    def run() -> None:
        loop.run_until_complete(serve())
        loop.call_soon(ready.set)  # once it runs, since a `stop` before that would be lost
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(10)
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(made.server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
