"""Measures the gain of asynchronous scheduling, and the cost of finding a cached prefix.

    python benchmarks/scheduling_cpu.py
    python benchmarks/scheduling_cpu.py --only prefixes

Asynchronous and synchronous scheduling serve the same requests in turn on one engine, so that other
load on the machine affects both equally. `host_time.py` measures the host's share of a step.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from report import RESULTS, provenance, summary, write_result

from specjax import LLM
from specjax.bench.workload import make_requests, read_questions, tokenize
from specjax.checkpoint.demo import demo_folder
from specjax.engine.engine import Engine
from specjax.host.pages import PageAllocator
from specjax.host.prefix_cache import PageKey, PrefixCache, extend_keys
from specjax.host.request import Request

K, PAGE_SIZE = 3, 16
BATCHES = (16, 64)
PREFIXES = (1024, 2048, 4096, 8192)


def main() -> None:
    """Measure the requested parts, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--only", choices=("async", "prefixes"))
    settings = parser.parse_args()
    source = provenance()
    tables = []
    if settings.only != "prefixes":
        tables.append(measure_async(settings))
    if settings.only != "async":
        tables.append(measure_prefixes())
    for table in tables:
        print(table["title"])
        for row in [table["columns"], *table["rows"]]:
            print(*row, sep="\t")
    result = {
        "title": "Scheduling on a CPU",
        "description": "Asynchronous against synchronous scheduling on demo-llama with its EAGLE-3 "
        f"drafter, K = {K}, and prefixes that are all cached.",
        "provenance": source,
        "settings": vars(settings),
        "tables": tables,
    }
    if settings.only is None:
        write_result(RESULTS / "scheduling_cpu.json", result)


def measure_async(settings: argparse.Namespace) -> dict[str, Any]:
    """Measure tokens per second with asynchronous and with synchronous scheduling, in pairs."""
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
    """Run all requests, and return the tokens per second."""
    engine.config = replace(engine.config, async_scheduling=is_async)
    start = time.perf_counter()
    samples = [sample for request in requests for sample in engine.add(request)]
    while engine.has_work:
        engine.step()
    return sum(sample.num_output for sample in samples) / (time.perf_counter() - start)


def measure_prefixes() -> dict[str, Any]:
    """Measure how many milliseconds it takes to look up a prompt whose pages are all cached."""
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


def keys_of(tokens: list[int]) -> list[PageKey]:
    """Return the keys of the pages that `tokens` fill."""
    keys: list[PageKey] = []
    extend_keys(keys, tokens, PAGE_SIZE, b"")
    return keys


if __name__ == "__main__":
    main()
