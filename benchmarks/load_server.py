"""Tests `specjax serve` under load by many clients; some leave, send nonsense, or read slowly.

    python benchmarks/load_server.py
    python benchmarks/load_server.py --seconds 60 --clients 50 --device simulated

Each client sends one request after another until the time is over. Two servers run at the same
time: one has pages for all requests, the other has so few pages that requests are preempted. Every
answer that a client reads to its end must have one finish reason per sample, and invalid requests
must get a 4xx status. At the end, a server must have no request and no page in use, its counters
must agree with the clients' counts, and its memory must not have grown by more than `MAX_GROWTH`
from the second quarter of the time to the last.
"""

import argparse
import asyncio
import json
import math
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from report import RESULTS, provenance, write_result

ROOT = Path(__file__).resolve().parents[1]
MODEL, DRAFTER, PORT = "demo-llama", "demo-llama-eagle3", 8239
SIZES = {"max-model-len": 256, "max-num-seqs": 16, "max-num-batched-tokens": 256, "page-size": 16}
# Few shapes, all compiled before the load: later compilation would also make the memory grow.
SHAPES = {"decode-batches": "[16]", "prefill-shapes": "[[4, 64]]"}
FEW_PAGES = 40  # 16 requests of the maximum length need 256
WAYS = {"leaves": 0.2, "sends nonsense": 0.05, "reads slowly": 0.05}
MAX_GROWTH = 24.0  # MiB, from the second quarter's median to the last quarter's
MAX_TOKENS = 64
NONSENSE = (
    b"GET / nonsense\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n",  # without a body
    *({"prompt": "a", "temperature": -1}, {"prompt": [[]]}, {"prompt": "a" * 5000}),
    {"messages": "no"},
    *({"prompt": "a", "structured_outputs": {"regex": "(a"}}, {"prompt": "a", "n": 10**9}),
)  # fmt: skip
EVENT, FINISH = re.compile(rb"data: (\{.*\})\n\n"), re.compile(rb'"finish_reason":"(\w+)"')


@dataclass
class Load:
    """The counts of all clients of a server, and the faults found."""

    seconds_to_first: list[float] = field(default_factory=list)
    became: Counter[str] = field(default_factory=Counter)
    num_samples: int = 0  # of answers read to the end
    num_tokens: int = 0  # of answers read to the end
    num_left_samples: int = 0  # of answers that a client left
    num_left_tokens: int = 0  # upper bound: the max_tokens of those samples
    faults: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both loads, and write the result. Return 0 if there were no faults, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600, help="of each load")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--device", default="auto", help="as for specjax serve")
    parser.add_argument("--json", type=Path, default=RESULTS / "load_server.json")
    settings = parser.parse_args(arguments)
    source, tables, faults = provenance(["starlette", "uvicorn", "msgspec"]), [], []
    for title, (rows, found) in asyncio.run(run_both(settings)).items():
        faults += [f"{title}: {fault}" for fault in found]
        columns, notes = ["", "value"], ["Times to the first token include waiting in the queue."]
        tables.append({"title": title, "columns": columns, "rows": rows, "notes": notes})
        print(f"{title}:", *(f"  {name}: {value}" for name, value in rows), *found, sep="\n")
    shares = ", ".join(f"{share:.0%} {way}" for way, share in WAYS.items())
    result = {
        "title": "`specjax serve` under load",
        "description": f"{settings.clients} clients for {settings.seconds:g} s, one request after "
        f"another, of 1 to {MAX_TOKENS} tokens; of the requests, a client {shares}.",
        "provenance": source,
        "settings": {n: getattr(settings, n) for n in ("seconds", "clients", "device")} | SIZES,
        "tables": tables,
        "samples": {"faults": faults},
    }
    write_result(settings.json, result)
    return 1 if faults else 0


async def run_both(settings: argparse.Namespace) -> dict[str, tuple[list[Any], list[str]]]:
    """Run both loads at the same time. Return the table's rows and the faults, by title."""
    loads = run(settings, PORT, None), run(settings, PORT + 1, FEW_PAGES)
    titles = "Pages for all requests", "Few pages"
    return dict(zip(titles, await asyncio.gather(*loads), strict=True))


async def run(
    settings: argparse.Namespace, port: int, pages: int | None
) -> tuple[list[Any], list[str]]:
    """Start a server and run a load. Return the rows of its table, and the faults."""
    command = [sys.executable, "-m", "specjax", "serve", MODEL, "--drafter", DRAFTER]
    sizes = SIZES | SHAPES | {"port": port, "device": settings.device}
    if pages is not None:
        sizes["num-pages"] = pages
    command += [f"--{name}={value}" for name, value in sizes.items()]
    command += ["--disable-uvicorn-access-log", "--uvicorn-log-level=error", "--k=2"]
    command.append("--compile-ahead")
    started = time.perf_counter()
    log = settings.json.with_suffix(f".{port}.log")
    with log.open("w") as errors, subprocess.Popen(command, cwd=ROOT, stderr=errors) as server:
        try:
            await first_answer(port, server)
            seconds = time.perf_counter() - started
            load, memory = Load(), []
            end = time.perf_counter() + settings.seconds
            watcher = asyncio.create_task(watch(server.pid, memory))
            await asyncio.gather(*(be_client(i, port, end, load) for i in range(settings.clients)))
            watcher.cancel()
            metrics = await idle_metrics(port, load)
        finally:
            server.terminate()
            ended = await asyncio.to_thread(server.wait, 60)
    load.faults += [f"the server ended with {ended}"] * (ended != 0)
    if "Traceback" in log.read_text():
        load.faults.append(f"{log.name} has a traceback")
    return check(load, metrics, memory, seconds), load.faults


async def first_answer(port: int, server: subprocess.Popen) -> None:
    """Wait for the answer to a first request.

    Raises:
        RuntimeError: the server has ended.
    """
    while server.poll() is None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.write(request("/v1/completions", {"prompt": "a", "max_tokens": 1}))
        assert b'"finish_reason":"length"' in await reader.read(-1)
        writer.close()
        return
    raise RuntimeError(f"the server on port {port} ended with {server.returncode}")


def request(path: str, body: dict[str, Any]) -> bytes:
    """Return an HTTP request as bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def be_client(number: int, port: int, end: float, load: Load) -> None:
    """Send requests until the time is over."""
    rng = random.Random(number)
    await asyncio.sleep(rng.random())
    ways = [*WAYS, "reads"]
    weights = [*WAYS.values(), 1 - sum(WAYS.values())]
    while time.perf_counter() < end:
        (way,) = rng.choices(ways, weights)
        try:
            if way == "sends nonsense":
                await send_nonsense(rng, port, load)
            else:
                await send(rng, way, port, load)
        except Exception as error:
            load.faults.append(f"a client that {way}: {error!r}")
            await asyncio.sleep(1)


async def send_nonsense(rng: random.Random, port: int, load: Load) -> None:
    """Send an invalid request. Check that it gets a 4xx status, or no answer if it is not HTTP."""
    given: Any = rng.choice(NONSENSE)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if isinstance(given, bytes):
        writer.write(given)
        writer.write_eof()
    else:
        path = "/v1/chat/completions" if "messages" in given else "/v1/completions"
        writer.write(request(path, given))
    answer = await asyncio.wait_for(reader.read(-1), 120)
    writer.close()
    if isinstance(given, dict) or answer:
        assert answer.startswith(b"HTTP/1.1 4"), answer[:300]
    load.became["refused"] += 1


async def send(rng: random.Random, way: str, port: int, load: Load) -> None:
    """Send a request, and read its answer to the end unless the client leaves."""
    is_stream, n, limit = rng.random() < 0.7, rng.choice([1, 1, 1, 2]), rng.randint(1, MAX_TOKENS)
    question = f"What is {rng.randint(1, 99)} + 4? " * rng.randint(1, 12)
    body: dict[str, Any] = {"max_tokens": limit, "n": n, "seed": rng.randint(0, 9)}
    path = rng.choice(["/v1/completions", "/v1/chat/completions"])
    if path == "/v1/completions":
        body["prompt"] = question
    else:
        body["messages"] = [{"role": "user", "content": question}]
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    connection = socket.socket()
    if way == "reads slowly":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    begin, received, num_reads = time.perf_counter(), b"", 0
    most_reads = rng.randint(0, 3) if way == "leaves" else math.inf
    size = 256 if way == "reads slowly" else 65536
    writer.write(request(path, body))
    try:
        if not most_reads:
            await asyncio.sleep(rng.random() / 10)
        while num_reads < most_reads and (part := await asyncio.wait_for(reader.read(size), 300)):
            num_reads += 1
            if b"data: " not in received and b"data: " in received + part:
                load.seconds_to_first.append(time.perf_counter() - begin)
            received += part
            if way == "reads slowly":
                await asyncio.sleep(0.02)
    finally:
        writer.transport.abort() if way == "leaves" else writer.close()
    assert not received or received.startswith(b"HTTP/1.1 200"), received[:300]
    reasons, ends = FINISH.findall(received), received.count(b"data: [DONE]")
    if way == "leaves" and (len(reasons) < n or ends < is_stream):
        load.became["left"] += 1
        load.num_left_samples += n
        load.num_left_tokens += n * limit
        return
    assert len(reasons) == n and ends == is_stream, received[-300:]
    assert set(reasons) <= {b"stop", b"length"}, reasons
    if is_stream:
        usage = json.loads(EVENT.findall(received)[-1])["usage"]
    else:
        usage = json.loads(received.partition(b"\r\n\r\n")[2])["usage"]
    load.became["read slowly" if way == "reads slowly" else "finished"] += 1
    load.num_samples += n
    load.num_tokens += usage["completion_tokens"]


async def watch(pid: int, memory: list[float]) -> None:
    """Append the resident memory of a process to `memory` every second, in MiB."""
    while True:
        (line,) = re.findall(r"VmRSS:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
        memory.append(int(line) / 2**10)
        await asyncio.sleep(1)


async def idle_metrics(port: int, load: Load) -> dict[str, float]:
    """Wait until the server has no request and no page in use, and return its metrics.

    After 30 seconds, add a fault to `load`, and return the metrics all the same.
    """
    names = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
    end = time.perf_counter() + 30
    while True:
        found = await asyncio.to_thread(read_metrics, port)
        left = [found[name] for name in names]
        if not any(left):
            return found
        if time.perf_counter() > end:
            load.faults.append(f"left at the end: {left}")
            return found
        await asyncio.sleep(0.1)


def read_metrics(port: int) -> dict[str, float]:
    """Return the sum of each metric over its labels, without histograms' buckets."""
    found: dict[str, float] = defaultdict(float)
    for line in urlopen(f"http://127.0.0.1:{port}/metrics").read().decode().splitlines():
        if line.startswith("vllm:") and "_bucket{" not in line:
            name, _, value = re.split(r"[{}]", line.removeprefix("vllm:"))
            found[name] += float(value)
    return found


def check(load: Load, metrics: dict[str, float], memory: list[float], seconds: float) -> list[Any]:
    """Add faults of the counters and of the memory to `load`. Return the rows of the table."""
    ended, tokens = metrics["request_success_total"], metrics["generation_tokens_total"]
    own_samples, own_tokens = load.num_samples + 1, load.num_tokens + 1  # and the first request
    if not own_samples <= ended <= own_samples + load.num_left_samples:
        load.faults.append(f"{ended} samples ended; clients read {own_samples} to the end")
    if not own_tokens <= tokens <= own_tokens + load.num_left_tokens:
        load.faults.append(f"{tokens} tokens; clients got {own_tokens}")
    quarter = len(memory) // 4
    medians = [float(np.median(memory[i * quarter : (i + 1) * quarter or None])) for i in range(4)]
    if quarter and medians[3] - medians[1] > MAX_GROWTH:
        load.faults.append(f"memory grew: medians of the quarters are {medians} MiB")
    first = [float(np.quantile(load.seconds_to_first, q)) for q in (0.5, 0.99)]
    return [
        ["seconds from start to first answer", round(seconds, 2)],
        *([f"requests: {name}", count] for name, count in sorted(load.became.items())),
        ["faults", len(load.faults)],
        ["samples that ended, for clients", own_samples],
        ["samples that ended or were aborted, in /metrics", ended],
        ["tokens that clients read to the end", own_tokens],
        ["tokens, in /metrics", tokens],
        ["preemptions", metrics["num_preemptions_total"]],
        ["seconds to the first token, median", round(first[0], 3)],
        ["seconds to the first token, 99th percentile", round(first[1], 3)],
        *([f"memory of quarter {i + 1}, median, MiB", round(m, 1)] for i, m in enumerate(medians)),
        ["requests and pages in use at the end", 0],
    ]


if __name__ == "__main__":
    sys.exit(main())
