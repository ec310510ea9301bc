"""Tests an AsyncLLM under load by many callers; some of them leave before their request ends.

    python benchmarks/load_async.py
    python benchmarks/load_async.py --model demo-qwen3.5 --method mtp --cancel 0.5

Callers take requests of mixed sizes in turn. Many prompts have a common prefix. Some requests are
given up in one of three ways: their task is cancelled before or during the output, their caller
leaves the iteration, or another caller aborts them by id. Every other request must finish exactly
once, at its length limit or at an end of sequence. Some of the outputs are compared with an engine
that has one slot and no drafter; near-ties are allowed (see `specjax.bench.identity`). At the end,
the engine must be empty, and the process must have as little memory as after the first requests.
"""

import argparse
import asyncio
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from report import RESULTS, provenance, summary, write_result

from specjax import LLM, AsyncLLM, RequestOutput, SamplingParams
from specjax.bench.identity import NEAR_TIE, Identity, compare
from specjax.checkpoint.demo import DRAFTERS, TARGET
from specjax.checkpoint.hub import resolve
from specjax.device.models.registry import describe_model, read_config

LONGEST_PROMPT, MAX_TOKENS = 200, 48
NUM_FAMILIES = 6  # number of common prefixes
COMMON = {"max_model_len": LONGEST_PROMPT + MAX_TOKENS, "max_logprobs": 0, "verbose": False}
SIZES = {"max_num_seqs": 16, "max_num_batched_tokens": 128}
MAX_GROWTH = 64.0  # MiB by which the process may grow after the first requests
QUANTILES = 0.5, 0.9, 0.99  # quantiles of latencies to report
WAYS = "cancelled at once", "cancelled", "left", "aborted"


@dataclass(frozen=True)
class Job:
    """A request, and the way in which its caller gives it up, if any."""

    number: int
    prompt: list[int]
    params: SamplingParams
    request_id: str | None
    way: str | None  # one of WAYS; None if the request is not given up
    delay: float  # number of outputs if `way` is "left", else seconds, until it is given up
    is_begun: bool  # whether `delay` begins at the first output, not at the call


@dataclass
class Tally:
    """The outcomes of the jobs."""

    finished: dict[int, RequestOutput] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # from call to end, of finished jobs
    first_seconds: list[float] = field(default_factory=list)  # from call to first output
    ids: Counter[Any] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    faults: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # MiB, at the end of each job


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load, then compare outputs. Return 0 if there were no faults, else 1."""
    settings = read_settings(arguments)
    source = provenance()
    model = settings.model
    return measure(model, drafter_of(settings), settings, source, SIZES)


def measure(
    model: str | Path,
    speculation: dict[str, Any] | None,
    settings: argparse.Namespace,
    source: dict[str, Any],
    sizes: dict[str, Any],
) -> int:
    """Run the load on a model, compare some outputs, and write the result."""
    options = COMMON | sizes
    vocab_size = describe_model(read_config(resolve(model))).vocab_size
    jobs = make_jobs(settings, vocab_size)
    tally, seconds, metrics = asyncio.run(
        run_load(model, jobs, settings.callers, options | {"speculative_config": speculation})
    )
    with LLM(model, **options | {"max_num_seqs": 1}) as alone:
        found = compare_sample(alone, jobs, tally, settings)
    growth = tally.memory[-1] - tally.memory[settings.warmup - 1]
    if growth > MAX_GROWTH:
        tally.faults.append(f"memory grew by {growth:.0f} MiB after {settings.warmup} requests")
    result = make_result(settings, source, tally, found, seconds, metrics)
    write_result(settings.json, result)
    for table in result["tables"]:
        print(f"{table['title']}:")
        print(*(f"  {name}: {_text(value)}" for name, value in table["rows"]), sep="\n")
    print(*found.near_ties, *found.mismatches, *tally.faults, sep="\n")
    return 1 if tally.faults or found.mismatches else 0


def read_settings(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=TARGET, help="a checkpoint")
    parser.add_argument("--method", default="eagle3", help="its demo drafter's; none for plain")
    parser.add_argument("--k", type=int, default=2, help="drafts per step")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--callers", type=int, default=200)
    parser.add_argument("--cancel", type=float, default=0.15, help="fraction that is given up")
    parser.add_argument("--compare", type=int, default=50, help="requests to run alone as well")
    parser.add_argument("--warmup", type=int, help="requests before memory is checked")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULTS / "load_async.json")
    settings = parser.parse_args(arguments)
    if settings.warmup is None:
        settings.warmup = min(500, settings.requests // 2)
    if not 0 < settings.warmup <= settings.requests:
        parser.error(f"--warmup {settings.warmup} must be in 1..--requests {settings.requests}")
    return settings


def drafter_of(settings: argparse.Namespace) -> dict[str, Any] | None:
    """Return the speculative config that the settings describe, with a demo checkpoint."""
    if settings.method == "none":
        return None
    folder = DRAFTERS[settings.model][settings.method]
    return {
        "method": settings.method,
        "model": None if settings.method == "mtp" else folder,
        "num_speculative_tokens": settings.k,
    }


def make_jobs(settings: argparse.Namespace, vocab_size: int) -> list[Job]:
    """Return the jobs, which depend only on the settings."""
    rng = np.random.default_rng(settings.seed)
    families = rng.integers(0, vocab_size, (NUM_FAMILIES, LONGEST_PROMPT))
    numbers = range(settings.requests)
    return [make_job(rng, number, families, vocab_size, settings.cancel) for number in numbers]


def make_job(
    rng: np.random.Generator,
    number: int,
    families: np.ndarray,
    vocab_size: int,
    share_given_up: float,
) -> Job:
    """Return a random job. Its prompt begins like a random row of `families`."""
    length = int(rng.integers(1, LONGEST_PROMPT + 1))
    prompt = families[rng.integers(len(families)), :length].copy()
    own = int(rng.integers(0, length + 1))
    prompt[own:] = rng.integers(0, vocab_size, length - own)
    stop = rng.integers(0, vocab_size, 4).tolist() if rng.random() < 0.5 else []
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.8])),
        seed=number,
        max_tokens=int(rng.integers(1, MAX_TOKENS + 1)),
        stop_token_ids=stop,
        ignore_eos=bool(rng.random() < 0.5),
    )
    way = str(rng.choice(WAYS)) if rng.random() < share_given_up else None
    is_named = way == "aborted" or rng.random() < 0.3
    delay = float(rng.integers(1, 9) if way == "left" else rng.exponential(0.3))
    request_id = f"request {number}" if is_named else None
    is_begun = bool(rng.random() < 0.5)
    return Job(number, prompt.tolist(), params, request_id, way, delay, is_begun)


async def run_load(
    model: str | Path, jobs: Sequence[Job], num_callers: int, options: dict[str, Any]
) -> tuple[Tally, float, dict[str, Any]]:
    """Let `num_callers` callers run all jobs; return outcomes, seconds, and the final metrics."""
    async with AsyncLLM(model, **options) as llm:
        tally = Tally()
        waiting = iter(jobs)
        start = time.perf_counter()
        await asyncio.gather(*(call(llm, waiting, tally) for _ in range(num_callers)))
        seconds = time.perf_counter() - start
        await check_idle(llm, tally)
        check(jobs, tally)
        return tally, seconds, llm.metrics().as_dict()


async def call(llm: AsyncLLM, jobs: Iterator[Job], tally: Tally) -> None:
    """Be a caller: run the next job of `jobs` until none is left."""
    for job in jobs:
        begun = asyncio.Event()
        await give_up(llm, job, asyncio.create_task(serve(llm, job, tally, begun)), begun, tally)
        tally.memory.append(resident_memory())


async def give_up(
    llm: AsyncLLM, job: Job, task: asyncio.Task[None], begun: asyncio.Event, tally: Tally
) -> None:
    """Give up a job after its delay, if it is to be given up; then wait for its task."""
    if job.way == "cancelled at once":
        await asyncio.sleep(0)
    elif job.way in ("cancelled", "aborted"):
        if job.is_begun:
            await begun.wait()
        await asyncio.wait([task], timeout=job.delay)
    if job.way == "aborted":
        await llm.abort(job.request_id)  # has no effect while the job waits for its turn
    elif job.way is not None and job.way.startswith("cancelled"):
        tally.given_up[job.way] += task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        if job.way is None:
            tally.faults.append(f"job {job.number} was cancelled by nobody")
    except Exception as error:
        tally.faults.append(f"job {job.number}: {error!r}")


async def serve(llm: AsyncLLM, job: Job, tally: Tally, begun: asyncio.Event) -> None:
    """Call `read`, and set `begun` at the end even if there was no output."""
    try:
        await read(llm, job, tally, begun)
    finally:
        begun.set()


async def read(llm: AsyncLLM, job: Job, tally: Tally, begun: asyncio.Event) -> None:
    """Read and check the outputs of a job to the end, or until its caller leaves."""
    start, num_outputs, last = time.perf_counter(), 0, None
    stream = llm.generate_stream(job.prompt, job.params, request_id=job.request_id)
    async with aclosing(stream):
        async for output in stream:
            begun.set()
            if last is None:
                tally.first_seconds.append(time.perf_counter() - start)
                tally.ids[output.request_id] += 1
            elif last.finished or not _goes_on(last, output):
                tally.faults.append(f"job {job.number} went on after {last} with {output}")
            last, num_outputs = output, num_outputs + 1
            if job.way == "left" and num_outputs >= job.delay and not output.finished:
                tally.given_up["left"] += 1
                tally.num_tokens += len(output.outputs[0].token_ids)
                return
    if last is None or not last.finished:
        tally.faults.append(f"job {job.number} ended with {last}")
        return
    tally.num_tokens += len(last.outputs[0].token_ids)
    if last.outputs[0].finish_reason == "abort":
        tally.given_up["aborted"] += 1
        if job.way != "aborted":
            tally.faults.append(f"job {job.number} was aborted by nobody")
        return
    if job.number in tally.finished:
        tally.faults.append(f"job {job.number} finished twice")
    tally.finished[job.number] = last
    tally.seconds.append(time.perf_counter() - start)


def check(jobs: Sequence[Job], tally: Tally) -> None:
    """Record faults: jobs that did not end as they should, and request ids that were used twice."""
    tally.faults += [f"id {one!r} came {n} times" for one, n in tally.ids.items() if n > 1]
    for job in jobs:
        output = tally.finished.get(job.number)
        if output is None:
            if job.way is None:
                tally.faults.append(f"job {job.number} never finished")
            continue
        (sample,) = output.outputs
        is_whole = len(sample.token_ids) == job.params.max_tokens
        if sample.finish_reason != "stop" and not (sample.finish_reason == "length" and is_whole):
            tally.faults.append(f"job {job.number} ended with {sample}")
        is_named = job.request_id in (None, output.request_id)
        if output.prompt_token_ids != job.prompt or not is_named:
            tally.faults.append(f"job {job.number} has the output of {output.request_id}")


async def check_idle(llm: AsyncLLM, tally: Tally) -> None:
    """Record a fault if requests or pages remain in the engine after the last caller left."""
    for _ in range(600):
        metrics = llm.metrics()
        left = metrics.num_requests_running, metrics.num_requests_waiting, metrics.kv_cache_usage
        if left == (0, 0, 0):
            return
        await asyncio.sleep(0.05)
    tally.faults.append(f"running, waiting, and pages in use at the end: {left}")


def compare_sample(
    alone: LLM, jobs: Sequence[Job], tally: Tally, settings: argparse.Namespace
) -> Identity:
    """Run some finished jobs again on the engine `alone`, and compare the outputs."""
    rng = np.random.default_rng([settings.seed, 1])
    numbers = rng.permutation(sorted(tally.finished))[: settings.compare]
    chosen = [jobs[number] for number in numbers]
    expected = [
        alone.generate(job.prompt, job.params, use_tqdm=False)[0].outputs[0].token_ids
        for job in chosen
    ]
    requests = [
        (alone.request_maker.make(job.prompt, job.params, job.number, "job"), 0) for job in chosen
    ]
    outputs = [tally.finished[job.number].outputs[0].token_ids for job in chosen]
    return compare(alone.engine, requests, expected, outputs)


def resident_memory() -> float:
    """Return the resident memory of the process, in MiB."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # take the maximum so far, which also reveals growth
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 2**10


def make_result(
    settings: argparse.Namespace,
    source: dict[str, Any],
    tally: Tally,
    found: Identity,
    seconds: float,
    metrics: dict[str, Any],
) -> dict[str, Any]:
    """Return the result in the format that `report.py` describes."""
    warm, hits = tally.memory[settings.warmup - 1], metrics["prefix_cache_hits"]
    num_given_up = sum(tally.given_up.values())
    outcome = [
        ["requests", settings.requests],
        ["finished", len(tally.finished)],
        *([f"given up: {way}", tally.given_up[way]] for way in WAYS),
        ["faults", len(tally.faults)],
        ["compared with runs alone", found.num_outputs],
        ["near-ties", len(found.near_ties)],
        ["mismatches", len(found.mismatches)],
    ]
    figures = [
        ["requests/s", settings.requests / seconds],
        ["tokens/s", tally.num_tokens / seconds],
        *([f"seconds to the end, {_name(q)}", _quantile(tally.seconds, q)] for q in QUANTILES),
        *(
            [f"seconds to the first output, {_name(q)}", _quantile(tally.first_seconds, q)]
            for q in QUANTILES
        ),
        ["acceptance length", metrics["mean_acceptance_length"]],
        ["share of tokens found in the cache", hits / metrics["prefix_cache_queries"]],
        [f"memory after {settings.warmup} requests, MiB", warm],
        ["memory at the end, MiB", tally.memory[-1]],
        ["memory in the second half, MiB", summary(tally.memory[len(tally.memory) // 2 :])],
    ]
    given = ("requests", "callers", "cancel", "k", "method", "seed", "compare", "warmup")
    return {
        "title": "An AsyncLLM under load",
        "description": f"{Path(settings.model).name} in float32, "
        f"{settings.method} with K = {settings.k}; {settings.requests} requests of 1 to "
        f"{LONGEST_PROMPT} tokens in {NUM_FAMILIES} families with common prefixes, 1 to "
        f"{MAX_TOKENS} tokens of output, by {settings.callers} callers; {num_given_up} given up.",
        "provenance": source,
        "settings": {name: getattr(settings, name) for name in given},
        "tables": [
            {
                "title": "What became of the requests",
                "columns": ["", "number"],
                "rows": outcome,
                "notes": [
                    "Requests that finished before they could be given up, or aborted while "
                    "they waited, count as finished.",
                    f"A near-tie is a difference where the two best scores lie within "
                    f"{NEAR_TIE:g}.",
                ],
            },
            {
                "title": "Throughput, latency and memory",
                "columns": ["", "value"],
                "rows": figures,
                "notes": [
                    "Latency starts at the call and includes waiting; tokens are counted in the "
                    "outputs that callers received.",
                ],
            },
        ],
        "samples": {
            "near_ties": found.near_ties,
            "mismatches": found.mismatches,
            "faults": tally.faults,
            "metrics": metrics,
        },
    }


def _goes_on(before: RequestOutput, after: RequestOutput) -> bool:
    (old,), (new,) = before.outputs, after.outputs
    is_longer = new.token_ids[: len(old.token_ids)] == old.token_ids
    is_text = old.text is None or (new.text or "").startswith(old.text)
    return before.request_id == after.request_id and is_longer and is_text


def _name(quantile: float) -> str:
    return "median" if quantile == 0.5 else f"{100 * quantile:.0f}th percentile"


def _quantile(values: Sequence[float], quantile: float) -> float:
    return float(np.quantile(values, quantile))


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and value < 100 else str(value)


if __name__ == "__main__":
    sys.exit(main())
