"""What a step in flight gains, and what the host's share of a step costs.

    python benchmarks/scheduling_cpu.py
    python benchmarks/scheduling_cpu.py --only host

Asynchronous and synchronous scheduling serve the same requests in turn on one engine, so that
whatever else the machine does falls on both alike. The host's share is measured without a device:
planning, packing, unpacking and committing rounds in which every draft's fate is drawn at random.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from report import RESULTS, provenance, summary, write_result

from specjax import LLM
from specjax.bench.workload import make_requests, read_questions, tokenize
from specjax.checkpoint.demo import demo_folder
from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Variant
from specjax.device.wanted import Wants
from specjax.engine.batch import pack, unpack_outputs
from specjax.engine.engine import Engine
from specjax.engine.layout import Layout
from specjax.engine.metrics import Recorder
from specjax.host.pages import PageAllocator
from specjax.host.plans import DecodePlan, StepPlan
from specjax.host.prefix_cache import Key, PrefixCache, extend_keys
from specjax.host.request import Request
from specjax.host.scheduler import Scheduler
from specjax.host.speculation.policy import StaticPolicy
from specjax.sampling_params import SamplingParams

K, PAGE_SIZE, PROMPT, NUM_ROUNDS = 3, 16, 500, 60
BATCHES = (16, 64)
NUM_REQUESTS = (32, 64, 128, 256, 512)
PREFIXES = (1024, 2048, 4096, 8192)


def main() -> None:
    """Measure what was asked for, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--only", choices=("async", "host"))
    settings = parser.parse_args()
    source = provenance()
    tables = []
    if settings.only != "host":
        tables.append(measure_async(settings))
    if settings.only != "async":
        tables += [measure_host(), measure_prefixes()]
    for table in tables:
        print(table["title"])
        for row in [table["columns"], *table["rows"]]:
            print(*row, sep="\t")
    result = {
        "title": "Scheduling on a CPU",
        "description": "Asynchronous against synchronous scheduling on demo-llama with its EAGLE-3 "
        f"drafter, K = {K}, and the host's share of a step.",
        "provenance": source,
        "settings": vars(settings),
        "tables": tables,
    }
    if settings.only is None:
        write_result(RESULTS / "scheduling_cpu.json", result)


def measure_async(settings: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second both ways, paired."""
    speculation = {
        "method": "eagle3",
        "model": str(demo_folder("demo-llama-eagle3")),
        "num_speculative_tokens": K,
    }
    rows = []
    for batch in BATCHES:
        with LLM(
            demo_folder("demo-llama"),
            speculative_config=speculation,
            max_model_len=256,
            max_num_seqs=batch,
            enable_prefix_caching=False,
            compile_ahead=True,
            verbose=False,
        ) as llm:
            questions = tokenize(read_questions(), llm.tokenizer)
            prompts = [questions[i % len(questions)] for i in range(batch)]
            requests = make_requests(
                prompts,
                max_tokens=settings.max_tokens,
                max_model_len=256,
                temperature=0.8,
                seed=0,
                stop_ids=(),
            )
            serve(llm.engine, requests, is_async=True)
            rates: dict[bool, list[float]] = {True: [], False: []}
            for i in range(settings.pairs):
                for is_async in (True, False) if i % 2 else (False, True):
                    rates[is_async].append(serve(llm.engine, requests, is_async=is_async))
            ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
            medians = [float(np.median(rates[is_async])) for is_async in (True, False)]
            rows.append([batch, *medians, summary(ratios)])
    return {
        "title": "A step in flight",
        "columns": ["requests", "tokens/s async", "tokens/s sync", "async / sync"],
        "rows": rows,
        "notes": [
            f"{settings.pairs} pairs, all requests at once, {settings.max_tokens} tokens each at "
            "temperature 0.8; outputs identical. Host and device are the same cores here, so "
            "nothing is gained by letting them work at the same time; a GPU is where it pays."
        ],
    }


def serve(engine: Engine, requests: Sequence[Request], *, is_async: bool) -> float:
    """Tokens per second."""
    engine.config = replace(engine.config, async_scheduling=is_async)
    start = time.perf_counter()
    samples = [sample for request in requests for sample in engine.add(request)]
    while engine.has_work:
        engine.step()
    return sum(sample.num_output for sample in samples) / (time.perf_counter() - start)


def measure_host() -> dict[str, Any]:
    """Milliseconds of the host per round, by the number of requests in it."""
    rows = []
    for count in NUM_REQUESTS:
        times = np.array([host_times(count, seed) for seed in range(3)]).reshape(-1, 4)
        total = times.sum(axis=1)
        parts = [float(x) for x in np.median(times, axis=0)]
        rows.append([count, summary(total), *parts, float(np.median(total)) / count * 1e3])
    return {
        "title": "The host's share of a round",
        "columns": [
            "requests", "ms per round", "plan", "pack", "unpack", "commit", "us per request",
        ],
        "rows": rows,
        "notes": [
            f"K = {K}, prompts of {PROMPT} tokens, pages of {PAGE_SIZE}, prefix caching on, a step "
            "in flight; without texts to look for, log-probabilities and grammars."
        ],
    }  # fmt: skip


def host_times(num_requests: int, seed: int) -> list[list[float]]:
    """Milliseconds to plan, pack, unpack and commit, of each round."""
    rng = np.random.default_rng(seed)
    most_tokens = 4 * (NUM_ROUNDS + num_requests + 20)
    config = EngineConfig(
        max_model_len=PROMPT + most_tokens,
        max_num_seqs=num_requests,
        max_num_batched_tokens=8 * PROMPT + (K + 1) * num_requests,
        num_pages=num_requests * -(-(PROMPT + most_tokens) // PAGE_SIZE),
        page_size=PAGE_SIZE,
    )
    scheduler = Scheduler(config, StaticPolicy(K))
    layout = Layout(num_requests, config.max_model_len, config.pages_per_seq, 1000)
    params = SamplingParams(ignore_eos=True)
    for i in range(num_requests):
        prompt = tuple(rng.integers(0, 1000, PROMPT).tolist())
        scheduler.add(Request(i, prompt, params, most_tokens, (0,)))
    while (before := scheduler.schedule()).prefill or scheduler.num_waiting:
        read(scheduler, before, rng)
    times, recorder = [], Recorder()
    for _ in range(NUM_ROUNDS):
        packed = give(before.decode, rng)
        marks = [time.perf_counter()]
        plan = scheduler.schedule()
        # What the engine asks of them before it launches.
        assert len({sequence.request.demands for sequence in plan.decode.sequences}) == 1
        marks.append(time.perf_counter())
        pack(plan.decode, layout, Wants(0))
        marks.append(time.perf_counter())
        (rows,) = unpack_outputs(packed, before.decode, Variant())
        marks.append(time.perf_counter())
        num_kept, _ = scheduler.commit(before.decode, rows)
        recorder.record_part(before.decode, rows, num_kept)
        marks.append(time.perf_counter())
        assert len(plan.decode.sequences) == num_requests
        times.append([1e3 * (b - a) for a, b in pairwise(marks)])
        before = plan
    return times


def read(scheduler: Scheduler, plan: StepPlan, rng: np.random.Generator) -> None:
    """Let results of a step be there."""
    for part in plan.parts:
        for rows in unpack_outputs(give(part, rng), part, Variant()):
            scheduler.commit(part, rows)


def give(part: Any, rng: np.random.Generator) -> np.ndarray:
    """What a device might make of a part of a step."""
    if not isinstance(part, DecodePlan):
        packed = np.zeros((part.batch, 3), np.int32)
        packed[: len(part.chunks), 0] = [chunk.samples for chunk in part.chunks]
        return packed
    packed = rng.integers(0, 1000, (1, part.batch, 3 + part.k), dtype=np.int32)
    packed[..., 0] = rng.integers(1, part.k + 2, part.batch)
    packed[..., 1] = part.k
    return packed


def measure_prefixes() -> dict[str, Any]:
    """Milliseconds to look a prompt up whose pages are all there."""
    rows = []
    for length in PREFIXES:
        tokens = np.random.default_rng(0).integers(0, 1000, length + 1).tolist()
        pages = PageAllocator(length)
        cache = PrefixCache(pages)
        keys = keys_of(tokens)
        cache.put(keys, pages.allocate(len(keys)) or [], 0, len(keys))
        times = []
        for _ in range(51):
            start = time.perf_counter()
            found = cache.take(keys_of(tokens)).pages
            times.append(1e3 * (time.perf_counter() - start))
            assert len(found) == len(keys)
            pages.release(found)
        rows.append([length, summary(times), float(np.median(times)) / length * 1e3])
    return {
        "title": "Looking up a prefix",
        "columns": ["tokens", "ms", "us per token"],
        "rows": rows,
        "notes": [f"Pages of {PAGE_SIZE} tokens, all of them found."],
    }


def keys_of(tokens: list[int]) -> list[Key]:
    """The keys of all pages."""
    keys: list[Key] = []
    extend_keys(keys, tokens, PAGE_SIZE, b"")
    return keys


if __name__ == "__main__":
    main()
