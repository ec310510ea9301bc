"""Brings an engine to its steady state before a measurement.

An engine starts with few compiled programs. It compiles others in the background, once lacking them
has cost enough time. A measurement should not span such changes, so programs are compiled first.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from specjax.bench.datasets.queries import Query
from specjax.bench.offline import Offline

ALLOWED = 0.05  # fraction of a run's time that missing programs may cost without being compiled
MAX_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """How an engine was warmed up.

    Attributes:
        num_runs: how often all prompts were run.
        seconds: time of the runs and of compiling.
        is_settled: whether the last run needed no further program.
    """

    num_runs: int
    seconds: float
    is_settled: bool


def warm_up(offline: Offline, queries: Sequence[Query], min_runs: int) -> WarmUp:
    """Run all prompts at least `min_runs` times, and until a run has all programs that it needs.

    After each run, the missing programs that cost the run most time are compiled. A run had all
    programs if none was compiled during or after the run. The run then lost at most the fraction
    `ALLOWED` of its time, unless a program failed to compile. After `MAX_SECONDS`, no run begins
    beyond the first `min_runs`.
    """
    start, num_runs, is_settled = time.perf_counter(), 0, False
    while num_runs < min_runs or not (is_settled or time.perf_counter() - start >= MAX_SECONDS):
        num_programs = offline.llm.metrics().num_compilations
        offline.llm.reset_prefix_cache()
        batch = offline.generate(queries)
        for engine in offline.llm.engine.engines:
            engine.repertoire.settle(1e3 * ALLOWED * batch.seconds)
            engine.programs.finish(show_progress=True)
        num_runs += 1
        is_settled = offline.llm.metrics().num_compilations == num_programs
    seconds = time.perf_counter() - start
    return WarmUp(num_runs=num_runs, seconds=seconds, is_settled=is_settled)
