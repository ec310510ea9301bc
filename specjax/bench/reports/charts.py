"""Makes the charts of a report from the `Details` of a result."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from specjax.bench.reports.content import Chart, Points
from specjax.bench.reports.tables import acceptance, measured
from specjax.bench.result import Details, Speculation


def acceptance_charts(found: Speculation) -> list[Chart]:
    """Return charts of acceptance by position, of rounds by K, and of the time of a round by K."""
    rates = {
        name: [(i + 1, rate) for i, rate in enumerate(one["rates_per_position"])]
        for name, one in acceptance(found).items()
        if one is not None
    }
    histogram = [(int(k), count) for k, count in found.k_histogram.items()]
    costs = [(int(k), ms) for k, ms in found.ms_per_round.items()]
    return [
        Chart("Acceptance by position", "position", "share of rounds", rates, is_bars=True),
        Chart("Rounds by K", "K", "rounds", {"": histogram}, is_bars=True),
        Chart("Time of a round by K", "K", "ms", {"": costs}, is_bars=True),
    ]


def charts_of_time(details: Details) -> list[Chart]:
    """Return charts of throughput, running requests and K over time, and of each distribution."""
    line = details.timeline or {}
    tokens, running = (list(enumerate(line.get(n, ()))) for n in ("output_tokens", "running"))
    rates = [one.get("output_tokens_per_second") for one in details.rounds]
    passes = [(i + 1, rate) for i, rate in enumerate(rates) if rate is not None]
    mean_k = _mean_k(line.get("k_histograms", ()))
    charts = [
        Chart("Throughput by pass", "pass", "output tokens/s", {"": passes}, is_bars=True),
        Chart("Throughput over time", "second", "output tokens", {"": tokens}),
        Chart("Running requests over time", "second", "requests", {"": running}),
        Chart("K over time", "second", "mean K", {"": mean_k}),
    ]
    for name, one in measured(details).items():
        steps = [(value, percent / 100) for percent, value in enumerate(one.quantiles)]
        charts.append(Chart(name, "at most", "share", {"": steps}))
    return charts


def _mean_k(samples: Sequence[Mapping[str, Any]]) -> Points:
    """Return points (seconds, mean K) from samples of the server's histogram of rounds by K.

    A point is the mean over the rounds between two samples, at the time of the second sample.
    """
    points = []
    for before, after in pairwise([{"rounds": {}}, *samples]):
        growth = {int(k): n - before["rounds"].get(k, 0) for k, n in after["rounds"].items()}
        if rounds := sum(growth.values()):
            mean = sum(k * count for k, count in growth.items()) / rounds
            points.append((after["seconds"], mean))
    return points
