"""Estimates confidence intervals (95 %) of the ratio of a figure in two runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from specjax.bench.reports.saved import Saved

Interval = tuple[float, float]
_LEVEL = 0.95
_DRAWS = 400
_BEYOND = 5  # values on either side of a percentile, so that a bootstrap of it means something


def of_rounds(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    """Return the confidence interval of the ratio of a figure, `after` / `before`.

    `before` and `after` hold the figure's values in the rounds of two runs. The interval is Welch's
    t-interval for the difference of the mean logarithms. Return None if a run has fewer than two
    rounds, or if a value is not above 0.
    """
    if min(len(before), len(after)) < 2 or min(*before, *after) <= 0:
        return None
    first, second = np.log(before), np.log(after)
    shift = float(second.mean() - first.mean())
    parts = first.var(ddof=1) / len(first), second.var(ddof=1) / len(second)
    if not sum(parts):
        return math.exp(shift), math.exp(shift)
    below = sum(p**2 / (len(x) - 1) for p, x in zip(parts, (first, second), strict=True))
    width = stats.t.ppf((1 + _LEVEL) / 2, sum(parts) ** 2 / below) * math.sqrt(sum(parts))
    return math.exp(shift - width), math.exp(shift + width)


def of_pairs(
    before: Mapping[Any, Sequence[float]], after: Mapping[Any, Sequence[float]]
) -> Interval | None:
    """Return the confidence interval of the ratio of a figure, `after` / `before`.

    `before` and `after` are two runs of the same prompts. They map each batch of prompts to the
    figure's values in the rounds with this batch. The logarithm of the ratio is computed for each
    batch that both runs have. The result is Student's t-interval for the mean of these logarithms.
    Return None if the runs have fewer than two batches in common, or if a value is not above 0.
    """
    both = [(before[key], after[key]) for key in before if key in after]
    if len(both) < 2 or min(min(*one, *other) for one, other in both) <= 0:
        return None
    shifts = np.array([np.log(other).mean() - np.log(one).mean() for one, other in both])
    error = float(shifts.std(ddof=1)) / math.sqrt(len(shifts))
    width = stats.t.ppf((1 + _LEVEL) / 2, len(shifts) - 1) * error
    return math.exp(shifts.mean() - width), math.exp(shifts.mean() + width)


def of_requests(
    statistic: str, before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> Interval | None:
    """Return the confidence interval of the ratio of a statistic of two runs.

    The interval comes from a bootstrap that draws whole requests. Return None if there are too few
    values for the statistic, or if the statistic is not above 0.

    Args:
        statistic: "mean", "median" or a percentile like "p99".
        before: the values of each request in the first run, such as its times between chunks.
        after: the values of each request in the second run.
    """
    random = np.random.default_rng(0)  # the draws of the two runs are independent
    first, second = _drawn(statistic, before, random), _drawn(statistic, after, random)
    if first is None or second is None or min(first) <= 0:
        return None
    tails = [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2]
    low, high = np.quantile(np.divide(second, first), tails).tolist()
    return low, high


def _drawn(
    statistic: str, requests: Sequence[Sequence[float]], random: np.random.Generator
) -> list[float] | None:
    """Return the statistic of each bootstrap sample; None if there are too few values."""
    flat = np.asarray([value for values in requests for value in values], float)
    owner = np.repeat(np.arange(len(requests)), [len(values) for values in requests])
    is_mean, percent = statistic == "mean", 50.0
    if statistic not in ("mean", "median"):
        percent = float(statistic.removeprefix("p"))
    if len(flat) * min(percent, 100 - percent) / 100 < _BEYOND:
        return None
    shares = [1 / len(requests)] * len(requests)
    counts = (random.multinomial(len(requests), shares) for _ in range(_DRAWS))
    samples = [np.repeat(flat, one[owner]) for one in counts]
    return [float(one.mean() if is_mean else np.percentile(one, percent)) for one in samples]


def values_per_request(saved: Saved, name: str) -> list[list[float]] | None:
    """Return the values of the latency `name` for each complete request, in milliseconds.

    `name` is "ttft", "tpot", "itl" or "e2el". Return None if the result has only summaries of the
    latency, as without `--save-detailed`.
    """
    top = saved.top
    if top.get("failed") and "errors" not in top:
        return None  # the latencies of failed requests are among the others
    try:
        rows = {
            "ttft": lambda: [[one] if one else [] for one in top["ttfts"]],
            "itl": lambda: top["itls"],
            "e2el": lambda: [[one] for one in top["latencies"]],
            "tpot": lambda: [
                [(latency - ttft) / (tokens - 1)] if tokens > 1 else []
                for latency, ttft, tokens in zip(
                    top["latencies"], top["ttfts"], top["output_lens"], strict=True
                )
            ],
        }[name]()
    except KeyError:
        return None
    errors = top.get("errors") or [""] * len(rows)
    pairs = zip(rows, errors, strict=True)
    return [[1e3 * value for value in row] for row, error in pairs if not error]
