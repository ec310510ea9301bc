"""`specjax bench latency`: how long one batch of prompts takes from beginning to end."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.bench.datasets.queries import Query
from specjax.bench.offline import BatchRun, Offline

PERCENTILES = 10, 25, 50, 75, 90, 99  # as in vLLM


def measure(
    offline: Offline, queries: Sequence[Query], num_iters: int, found: list[BatchRun]
) -> None:
    """Run the batch repeatedly, and append each result to `found`.

    After an interrupt, `found` has the completed runs. Each run starts with an empty prefix cache.
    """
    offline.watch()
    for _ in range(num_iters):
        offline.llm.reset_prefix_cache()
        found.append(offline.generate(queries))


def figures(batches: Sequence[BatchRun]) -> dict[str, Any]:
    """Return the seconds of each run, and the mean and percentiles of these seconds.

    The keys are as in `vllm bench latency`.
    """
    latencies = [batch.seconds for batch in batches]
    values = np.percentile(latencies, PERCENTILES).tolist()
    return {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": {str(p): value for p, value in zip(PERCENTILES, values, strict=True)},
    }
