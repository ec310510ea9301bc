"""Measures the HTTP server's own speed: `specjax serve --device simulated`.

    python benchmarks/server_cpu.py
    python benchmarks/server_cpu.py --streams 64 --tokens 100

All drafts are accepted, so that each event of a stream has K + 1 = 3 tokens. The clients run in
another process. Three processor times are measured:

- the thread of the event loop, which answers clients
- the engine's thread, while it makes texts and outputs
- the rest of the engine's thread: the engine's loop and the simulated device
"""

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from report import RESULTS, provenance, summary, write_result
from starlette.responses import JSONResponse

from specjax.async_llm import AsyncLLM
from specjax.cli import main as run_command
from specjax.server import app
from specjax.server.openapi import DescribedRoute

MODEL, K, NUM_RUNS = "demo-llama", 2, 7
PATHS = "/v1/completions", "/v1/chat/completions"
LOOP, OUTPUTS, ENGINE = "event loop", "texts and outputs", "engine and device"


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=300, help="per stream; default: %(default)s")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.serve is not None:
        return serve(settings.serve, settings.streams)
    source, port = provenance(["starlette", "uvicorn", "msgspec"]), 8237
    arguments = [f"--streams={settings.streams}", f"--serve={port}"]
    with subprocess.Popen([sys.executable, __file__, *arguments]) as server:
        try:
            wait_for(port)
            rows = [repeat(port, path, settings.streams, settings.tokens) for path in PATHS]
            latencies = [measure_first(port) for _ in range(50)]
        finally:
            server.terminate()
    tables = [
        {
            "title": f"{settings.streams} streams of {settings.tokens} tokens",
            "columns": [
                *("door", "tokens per second", "tokens per event"),
                *(f"{name}, microseconds per event" for name in (LOOP, OUTPUTS, ENGINE)),
                "tokens per second of event loop and outputs",
            ],
            "rows": rows,
            "notes": [
                "All streams run at the same time; tokens per second are of the whole run. "
                f"{NUM_RUNS} runs after one to warm up."
            ],
        },
        {
            "title": "One stream at a time",
            "columns": ["milliseconds to the first event", "in the engine"],
            "rows": [[summary(times) for times in zip(*latencies, strict=True)]],
            "notes": ["50 requests, one after another, each on a new connection."],
        },
    ]
    result = {
        "title": "The HTTP server's own speed",
        "description": "Streams of `specjax serve` with a simulated device; processor times.",
        "provenance": source,
        "settings": {"streams": settings.streams, "tokens": settings.tokens},
        "tables": tables,
    }
    print(json.dumps(tables, indent=1))
    write_result(RESULTS / "server_cpu.json", result)


def serve(port: int, num_streams: int) -> None:
    """Run the server on a simulated device. GET /times returns its threads' processor times."""
    threads = {LOOP: threading.get_native_id()}
    spent = {OUTPUTS: 0.0}
    start, publish = AsyncLLM._serve, AsyncLLM._publish

    def start_timed(self: AsyncLLM) -> None:
        threads[ENGINE] = threading.get_native_id()
        start(self)

    def publish_timed(self: AsyncLLM, ids: Any) -> None:
        begin = time.thread_time()
        publish(self, ids)
        spent[OUTPUTS] += time.thread_time() - begin

    async def times(_: Any) -> JSONResponse:
        return JSONResponse({name: thread_seconds(one) for name, one in threads.items()} | spent)

    app.ROUTES.append(DescribedRoute("/times", times))
    command = f"serve {MODEL} --device simulated --port {port} --speculative-config".split()
    command.append(json.dumps({"method": "ngram", "num_speculative_tokens": K}))
    sizes = {"max_model_len": 1024, "max_num_seqs": num_streams, "max_num_batched_tokens": 4096}
    for name, value in (sizes | {"page_size": 64}).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    command += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    with (
        patch.object(AsyncLLM, "_serve", start_timed),
        patch.object(AsyncLLM, "_publish", publish_timed),
    ):
        run_command([*command, "--enable-per-request-metrics"])


def thread_seconds(thread: int) -> float:
    """Return the processor time of a thread of this process."""
    fields = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def wait_for(port: int) -> None:
    """Wait until the server answers."""
    while True:
        try:
            read(port, "/times")
        except OSError:
            time.sleep(0.1)
        else:
            return


def read(port: int, path: str) -> dict[str, float]:
    """Return the JSON that the server sends for GET `path`."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", path)
    return json.loads(connection.getresponse().read())


def repeat(port: int, path: str, num_streams: int, num_tokens: int) -> list[Any]:
    """Return a table row: the summary of several runs of the endpoint `path`."""
    measure(port, path, num_streams, num_tokens)
    runs = [measure(port, path, num_streams, num_tokens) for _ in range(NUM_RUNS)]
    return [path, *(summary(values) for values in list(zip(*runs, strict=True))[1:])]


def measure(port: int, path: str, num_streams: int, num_tokens: int) -> list[Any]:
    """Return the figures of one run of the endpoint `path`, with all streams at the same time."""
    before, begin = read(port, "/times"), time.perf_counter()
    bodies = asyncio.run(read_streams(port, path, num_streams, num_tokens))
    seconds = time.perf_counter() - begin
    spent = {name: value - before[name] for name, value in read(port, "/times").items()}
    spent[ENGINE] -= spent[OUTPUTS]
    num_events = sum(body.count(b"data: {") for body in bodies)
    assert all(b'"finish_reason":"length"' in body for body in bodies)
    total = num_streams * num_tokens
    return [
        path,
        round(total / seconds),
        total / num_events,
        *(1e6 * spent[name] / num_events for name in (LOOP, OUTPUTS, ENGINE)),
        round(total / (spent[LOOP] + spent[OUTPUTS])),
    ]


async def read_streams(port: int, path: str, num_streams: int, num_tokens: int) -> list[bytes]:
    """Return all that the streams sent."""
    return await asyncio.gather(
        *(read_stream(port, path, number, num_tokens) for number in range(num_streams))
    )


async def read_stream(port: int, path: str, number: int, num_tokens: int) -> bytes:
    """Return all that a stream sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(path, number, num_tokens))
    body = await reader.read(-1)
    writer.close()
    return body


def request(path: str, number: int, num_tokens: int) -> bytes:
    """Return the bytes of a request."""
    question = f"What is {number} + 4?"
    body: dict[str, Any] = {"prompt": question}
    if "chat" in path:
        body = {"messages": [{"role": "user", "content": question}]}
    body |= {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def measure_first(port: int) -> tuple[float, float]:
    """Return the milliseconds to a stream's first event, for the client and in the engine."""
    data = request(PATHS[0], 1, 8)
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    connection.connect()
    begin = time.perf_counter()
    connection.sock.sendall(data)
    received = b""
    while b"data: " not in received:
        received += connection.sock.recv(2**16)
    milliseconds = 1e3 * (time.perf_counter() - begin)
    while part := connection.sock.recv(2**16):
        received += part
    last = received.split(b"data: ")[-2].split(b"\n")[0]
    return milliseconds, json.loads(last)["metrics"]["time_to_first_token_ms"]


if __name__ == "__main__":
    main()
