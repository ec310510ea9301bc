"""Figures of a run's requests: the keys of `vllm bench serve`, distributions, and a timeline."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.bench.result import Distribution
from specjax.bench.traffic.record import Record

TIMES = "ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue"
QUEUED = TIMES[4:]  # only with --max-concurrency
DEFAULT_TIMES = "ttft,tpot,itl,e2el"
_STEADY = 0.1, 0.9  # shares of the run, if its requests never all run at the same time
_MOST_SECONDS = 100_000  # of a timeline; the last entry includes later seconds


def times(records: Sequence[Record]) -> dict[str, list[float]]:
    """Return the latencies of complete requests in milliseconds, by the names in `TIMES`.

    As in vLLM, tpot is the time after the first token, divided by the number of tokens after the
    first. itl is the time between two chunks. With drafts, a chunk has several tokens.
    """
    seconds: dict[str, list[float]] = {
        "ttft": [one.ttft for one in records if one.ttft is not None],
        "tpot": [one.tpot for one in records if one.output_len > 1],
        "itl": [gap for one in records for gap in one.gaps],
        "e2el": [one.latency for one in records if one.latency is not None],
        "client_queue_time": [one.queue_time for one in records],
        "e2el_including_client_queue": [
            one.latency + one.queue_time for one in records if one.latency is not None
        ],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def statistics(
    found: Mapping[str, Sequence[float]], names: Sequence[str], percentiles: Sequence[float]
) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles of latencies, by vLLM's keys.

    As in vLLM, all figures of a latency without measurements are 0.
    """
    figures: dict[str, float] = {}
    for name in names:
        values = np.asarray(found[name] or [0.0])
        figures[f"mean_{name}_ms"] = float(values.mean())
        figures[f"median_{name}_ms"] = float(np.median(values))
        figures[f"std_{name}_ms"] = float(values.std())
        for percentile in percentiles:
            figures[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    return figures


def distributions(records: Sequence[Record]) -> dict[str, Distribution | None]:
    """Return distributions of times and of tokens per chunk, for `Details.distributions`."""
    found = times(records)
    tokens = [float(count) for one in records for count in one.chunk_tokens]
    return {
        **{f"{name}_ms": Distribution.of(found[name]) for name in TIMES[:4]},
        "queue_ms": Distribution.of(found["client_queue_time"]),
        "tokens_per_chunk": Distribution.of(tokens),
    }


def chunk_times(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: the arrival time of each chunk, and the number of tokens of each chunk.

    Times are seconds after the start of the run. If the numbers of tokens are unknown, the output
    tokens are divided evenly among the chunks.
    """
    if record.ttft is None:
        return np.zeros(0), np.zeros(0)
    at = record.sent + record.ttft + np.cumsum([0.0, *record.gaps])
    if len(record.chunk_tokens) == len(at):
        return at, np.asarray(record.chunk_tokens, float)
    return at, np.full(len(at), record.output_len / len(at))


def timeline(records: Sequence[Record], duration: float) -> dict[str, list[float]]:
    """Return, for each second, the number of output tokens and the peak of running requests."""
    num_seconds = min(int(duration) + 1, _MOST_SECONDS)
    tokens, running = np.zeros(num_seconds), np.zeros(num_seconds)
    changes: list[tuple[float, int]] = []
    for record in records:
        at, counts = chunk_times(record)
        np.add.at(tokens, np.minimum(at.astype(int), num_seconds - 1), counts)
        end = record.sent + record.latency if record.latency is not None else duration
        changes += [(record.sent, 1), (end, -1)]
    now, second = 0, 0
    for when, change in sorted(changes):
        while second < min(int(when), num_seconds - 1):
            second += 1
            running[second] = now
        now += change
        running[second] = max(running[second], now)
    return {"output_tokens": tokens.tolist(), "running": running.tolist()}


def steady(records: Sequence[Record], duration: float) -> dict[str, Any] | None:
    """Return figures of the time in which the number of running requests is about constant.

    `Details.steady` defines this time. Return None if no request has tokens, or none has ended.
    """
    first = [one.sent + one.ttft for one in records if one.ttft is not None]
    last = [one.sent + one.latency for one in records if one.latency is not None]
    if not first or not last:
        return None
    begin, end = max(first), min(last)
    rule = "all requests are running"
    if begin >= end:
        begin, end = (share * duration for share in _STEADY)
        rule = f"from {_STEADY[0]:.0%} to {_STEADY[1]:.0%} of the run"
    seconds, tokens, busy = end - begin, 0.0, 0.0
    for record in records:
        at, counts = chunk_times(record)
        tokens += float(counts[(at > begin) & (at <= end)].sum())
        stop = record.sent + (record.latency or 0.0)
        busy += max(0.0, min(end, stop) - max(begin, record.sent))
    if seconds <= 0:
        return None
    return {
        "rule": rule,
        "begin": begin,
        "end": end,
        "output_throughput": tokens / seconds,
        "mean_running": busy / seconds,
        "ms_per_token": 1e3 * busy / tokens if tokens else None,
    }


def totals(
    records: Sequence[Record], complete: Sequence[Record], duration: float
) -> dict[str, Any]:
    """Return counts and rates by vLLM's keys. Failed requests count only as "failed"."""
    num_input, num_output = (
        sum(getattr(one, name) for one in complete) for name in ("prompt_len", "output_len")
    )
    per_second = 1 / duration if duration else 0.0
    return {
        "duration": duration,
        "completed": len(complete),
        "failed": len(records) - len(complete),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(complete) * per_second,
        "request_goodput": None,
        "output_throughput": num_output * per_second,
        "total_token_throughput": (num_input + num_output) * per_second,
    }


def arrays(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Return the lists of vLLM's --save-detailed, with an entry per request."""
    return {
        "input_lens": [one.prompt_len for one in records],
        "output_lens": [one.output_len for one in records],
        "ttfts": [one.ttft or 0.0 for one in records],
        "itls": [one.gaps for one in records],
        "latencies": [one.latency or 0.0 for one in records],
        "start_times": [one.sent for one in records],
        "queue_times": [one.queue_time for one in records],
        "generated_texts": [one.text for one in records],
        "errors": [one.error or "" for one in records],
    }
