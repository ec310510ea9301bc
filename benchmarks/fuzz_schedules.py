"""Runs random schedules of events in an engine, and accounts for every token, page and slot.

    python benchmarks/fuzz_schedules.py
    python benchmarks/fuzz_schedules.py --schedules 10000 --seed 0 --real 50

Most schedules run the engine's loop and scheduler on a simulated device, which checks all its
inputs (tests/fuzz). A request must have the same tokens as when it runs alone. Some schedules run
on real engines. There, a difference counts as a near-tie if the two best scores lie within 2e-4.
For a failure, the seed and the command that repeats it are printed.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from report import RESULTS, provenance, write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from stress_accepted_counts import write_random  # noqa: E402
from support.real_schedules import Found, run_real_schedule  # noqa: E402
from support.schedule_runs import check_schedule  # noqa: E402

from specjax import LLM  # noqa: E402
from specjax.bench.identity import NEAR_TIE  # noqa: E402

GROUP = 50  # number of schedules that a process runs as one task
K = 3
MIN_PAGES, MAX_PAGES = 8, 10
SIZES: dict[str, Any] = {
    "max_model_len": 8 * MIN_PAGES, "page_size": 8, "max_num_batched_tokens": 32,
    "max_logprobs": 0, "verbose": False,
}  # fmt: skip
COUNTS = [
    "schedules", "requests", "steps", "tokens", "finished", "aborted", "preemptions",
    "preemptions in flight", "mixed steps", "chunks side by side",
    "steps launched over another",
    "prompt tokens run", "prefix hits", "snapshots taken", "snapshots restored", "masks",
    "preempt", "fail", "reset", "clear", "cells read",
]  # fmt: skip
NAMES = {
    "finished": "samples finished",
    "aborted": "samples aborted",
    "prefix hits": "prompt tokens found in the caches",
    "masks": "masks of grammars",
    "preempt": "preemptions at any moment",
    "fail": "failures of the device",
    "reset": "resets",
    "clear": "times that prefixes were forgotten",
    "cells read": "cells checked when read",
}
REAL_COLUMNS = [
    "engine", "schedules", "requests", "generations", "tokens", "accepted", "preemptions",
    "aborted", "prefix hits", "near-ties", "mismatches",
]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all schedules; return 0 if none failed."""
    settings = read_settings(arguments)
    source = provenance()
    start = time.perf_counter()
    tally, failures = run_simulated(settings)
    seconds = time.perf_counter() - start
    print_tally(tally, seconds)
    real = run_real(settings, failures)
    mismatches = [text for found in real.values() for text in found.identity.mismatches]
    print(f"{len(failures)} failures, {len(mismatches)} mismatches", *mismatches, sep="\n")
    write(settings, source, tally, seconds, real, failures)
    return 1 if failures or mismatches else 0


def read_settings(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=10_000, help="on the simulated device")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; ascending")
    parser.add_argument("--real", type=int, default=50, help="on each of two real engines")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the result; not for single schedules")
    settings = parser.parse_args(arguments)
    if settings.json is None and settings.schedules + settings.real > 1:
        settings.json = RESULTS / "fuzz_schedules.json"
    return settings


def run_simulated(settings: argparse.Namespace) -> tuple[Counter, list[str]]:
    """Run schedules on the simulated device; return the tally and the failures."""
    tally: Counter = Counter()
    failures: list[str] = []
    last = settings.seed + settings.schedules
    groups = [range(s, min(s + GROUP, last)) for s in range(settings.seed, last, GROUP)]
    if len(groups) < 2:
        results = map(run_group, groups)
        return merge(results, tally, failures)
    # JAX has threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(settings.processes, mp_context=context) as pool:
        futures = [pool.submit(run_group, group) for group in groups]
        return merge((future.result() for future in as_completed(futures)), tally, failures)


def merge(results: Any, tally: Counter, failures: list[str]) -> tuple[Counter, list[str]]:
    """Add up the tallies of groups, and print progress from time to time."""
    for number, (counted, failed) in enumerate(results, start=1):
        tally.update(counted)
        failures += failed
        for text in failed:
            print(text, flush=True)
        if number % 20 == 0:
            print(f"{tally['schedules']} schedules, {len(failures)} failures", flush=True)
    return tally, failures


def run_group(seeds: range) -> tuple[Counter, list[str]]:
    """Run the schedules with these seeds; return their tally and their failures."""
    tally: Counter = Counter()
    failures = []
    for seed in seeds:
        try:
            tally.update(check_schedule(seed))
        except Exception:
            failures.append(f"seed {seed}: {traceback.format_exc()}")
    return tally, failures


def print_tally(tally: Counter, seconds: float) -> None:
    """Print the tally of schedules on the simulated device."""
    for name in COUNTS:
        print(f"{NAMES.get(name, name)}: {tally[name]}")
    print(f"most steps in flight when another is launched: {max_tokens_in_flight(tally)}")
    print(f"seconds: {seconds:.0f}", flush=True)


def max_tokens_in_flight(tally: Counter) -> int:
    """Return 1 if any step was launched while another step was running, else 0."""
    return int(tally["steps launched over another"] > 0)


def run_real(settings: argparse.Namespace, failures: list[str]) -> dict[str, Found]:
    """Run schedules on real engines; return their results by engine."""
    real: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if settings.real:
            write_random(Path(folder))
        engines = {
            "Llama and EAGLE-3": ("eagle3", ROOT / "checkpoints" / "demo-llama"),
            "hybrid and MTP, random": ("mtp", folder),
        }
        for name, (method, target) in engines.items() if settings.real else ():
            llm, alone = make_llms(stack, method, target)
            found = Found()
            for seed in range(settings.seed, settings.seed + settings.real):
                try:
                    found += run_real_schedule(llm, alone, seed)
                except Exception:
                    failures.append(f"{name}, seed {seed}: {traceback.format_exc()}")
                    print(failures[-1], flush=True)
                    llm.engine.reset()
            real[name] = found
            print(*map(": ".join, zip(REAL_COLUMNS, map(str, row(name, found)), strict=True)),
                  sep="  ", flush=True)  # fmt: skip
    return real


def make_llms(stack: ExitStack, method: str, target: str | Path) -> tuple[LLM, LLM]:
    """Return an engine that has few pages and makes drafts, and an engine with one slot only."""
    head = f"{target}-eagle3" if method == "eagle3" else str(target)
    drafter = {"method": method, "model": head, "num_speculative_tokens": K}
    llm = LLM(
        target,
        speculative_config=drafter,
        max_num_seqs=4,
        num_pages=MAX_PAGES,
        num_snapshots=2,
        **SIZES,
    )
    alone = LLM(target, max_num_seqs=1, enable_prefix_caching=False, **SIZES)
    return stack.enter_context(llm), stack.enter_context(alone)


def row(name: str, found: Found) -> list[Any]:
    """Return an engine's results as a row of the table."""
    identity, tally = found.identity, found.tally
    return [
        name, tally["schedules"], tally["requests"], identity.num_outputs, tally["tokens"],
        tally["accepted"], tally["preemptions"], tally["aborted"], tally["prefix hits"],
        len(identity.near_ties), len(identity.mismatches),
    ]  # fmt: skip


def write(
    settings: argparse.Namespace,
    source: dict[str, Any],
    tally: Counter,
    seconds: float,
    real: dict[str, Found],
    failures: list[str],
) -> None:
    """Write the result to its file."""
    if settings.json is None:
        return
    mismatches = [text for found in real.values() for text in found.identity.mismatches]
    near_ties = [text for found in real.values() for text in found.identity.near_ties]
    simulated = {
        "title": f"{tally['schedules']} schedules on a simulated device, {len(failures)} failures",
        "columns": ["what", "how often"],
        "rows": [
            *([NAMES.get(name, name), tally[name]] for name in COUNTS),
            ["most steps in flight when another is launched", max_tokens_in_flight(tally)],
        ],
        "notes": [
            f"In {seconds:.0f} seconds on {settings.processes} processes. Every engine, its "
            "requests, and what happens to them are random.",
            "Where nothing but the device decides what comes out, a schedule is run synchronously "
            "as well; those runs are not counted.",
        ],
    }
    served = {
        "title": "Schedules on real engines",
        "columns": REAL_COLUMNS,
        "rows": [row(name, found) for name, found in real.items()],
        "notes": [
            f"K = {K}; up to four slots, up to {MAX_PAGES} pages where one request may need "
            f"{MIN_PAGES}; against an engine with one slot and no drafter.",
            f"A near-tie is a difference where the two best scores lie within {NEAR_TIE:g}.",
        ],
    }
    result = {
        "title": "Random schedules",
        "description": "Requests come, are preempted, aborted, and find the device failing; "
        "after every step pages, slots, snapshots and tokens are accounted for.",
        "provenance": source,
        "settings": {name: value for name, value in vars(settings).items() if name != "json"},
        "tables": [simulated, served],
        "samples": {"failures": failures, "near_ties": near_ties, "mismatches": mismatches},
    }
    write_result(settings.json, result)


if __name__ == "__main__":
    sys.exit(main())
