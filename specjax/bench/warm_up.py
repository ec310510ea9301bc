"""Brings an engine to its steady state before a measurement.

An engine starts with few compiled programs. It compiles a missing program in the background when
the program's absence has cost enough time. Steps then become faster. This should not happen during
a measurement, so programs are compiled first.
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
        is_settled: whether no program was compiled during or after the last run.
    """

    num_runs: int
    seconds: float
    is_settled: bool


def warm_up(offline: Offline, queries: Sequence[Query], min_runs: int) -> WarmUp:
    """Run all prompts at least `min_runs` times, and until no more programs are compiled.

    After each run, missing programs are compiled, those first that cost the run the most time,
    until the others together cost at most the fraction `ALLOWED` of the run's time. The warm-up
    ends when no program was compiled in or after a run, or once `MAX_SECONDS` have passed. It never
    ends before `min_runs` runs.
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
