"""`specjax bench serve`: sends requests to a server at a rate, and measures the responses."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specjax.bench.datasets.queries import Query
from specjax.bench.peers.peer import compare_outputs
from specjax.bench.result import (
    Details,
    Speculation,
    count_failures,
    vllm_speculation,
)
from specjax.bench.ties import tell_ties
from specjax.bench.traffic.arrivals import Arrivals
from specjax.bench.traffic.drive import Traffic, drive
from specjax.bench.traffic.endpoint import Endpoint, open_session
from specjax.bench.traffic.figures import (
    QUEUED,
    arrays,
    distributions,
    statistics,
    steady,
    timeline,
    times,
    totals,
)
from specjax.bench.traffic.goodput import goodput
from specjax.bench.traffic.record import by_group
from specjax.bench.traffic.scrape import scrape

_POLLING_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """When requests are sent, and which figures are reported.

    Args:
        times: names of the latencies to report, from `figures.TIMES`.
        percentiles: the percentiles of these latencies to report.
        limits: limits for goodput in milliseconds, by name of the latency.
    """

    arrivals: Arrivals
    max_concurrency: int | None
    num_warmups: int
    times: Sequence[str]
    percentiles: Sequence[float]
    limits: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0


def as_traced(settings: LoadSettings, queries: Sequence[Query]) -> LoadSettings:
    """Return `settings` with the arrival times of the prompts, if the data set gives such times.

    Raises:
        ValueError: the data set gives times, and `settings` have a rate or a burstiness.
    """
    trace = [query.arrival for query in queries if query.arrival is not None]
    if not trace:
        return settings
    return replace(settings, arrivals=replace(settings.arrivals, trace=trace))


def warm_up(settings: LoadSettings, endpoint: Endpoint, queries: Sequence[Query]) -> None:
    """Send the first `num_warmups` prompts, at least one prompt. Ignore the responses.

    Then wait until the server has finished compiling.

    Raises:
        ValueError: the first request failed, so nothing could be measured.
    """
    first = queries[: max(1, settings.num_warmups)]
    found = drive(endpoint, first, Arrivals(), max_concurrency=settings.max_concurrency)
    if found.is_interrupted:
        raise KeyboardInterrupt
    for record in found.records[:1]:
        if record.error is not None:
            raise ValueError(f"{endpoint.root} does not answer a request: {record.error}")
    asyncio.run(_compiled(endpoint))


async def _compiled(endpoint: Endpoint) -> None:
    """Wait while /metrics reports that the server is compiling."""
    async with open_session(endpoint.headers) as session:
        while (found := await scrape(session, endpoint.root)) and found.is_compiling:
            await asyncio.sleep(_POLLING_SECONDS)


def top(settings: LoadSettings, traffic: Traffic, detailed: bool) -> dict[str, Any]:
    """Return the figures of a run, under the keys that `vllm bench serve` uses.

    The JSON result has these figures after the settings that `head` returns. Two lists with an
    entry per request are always included: `latencies` and `queue_times`. `detailed` adds vLLM's
    other lists.
    """
    records, complete = traffic.records, traffic.complete
    found = goodput(settings.limits, complete, len(records), traffic.duration)
    figures = totals(records, complete, traffic.duration)
    if found is not None:
        figures["request_goodput"] = found["requests_per_second"]
    listed = arrays(records)
    if not detailed:  # vLLM always writes these two
        listed = {name: listed[name] for name in ("latencies", "queue_times")}
    seconds = timeline(records, traffic.duration)
    growth = traffic.growth
    names = [*settings.times, *(QUEUED if settings.max_concurrency else ())]
    return {
        **figures,
        **listed,
        "max_output_tokens_per_s": max(seconds["output_tokens"], default=0.0),
        "max_concurrent_requests": int(max(seconds["running"], default=0)),
        "rtfx": 0.0,  # vLLM's figure for audio
        **vllm_speculation(growth.accepted if growth else None),
        **statistics(times(complete), list(dict.fromkeys(names)), settings.percentiles),
    }


def fill(details: Details, settings: LoadSettings, traffic: Traffic) -> None:
    """Fill in the fields of `details` that are computed from the requests of a run."""
    records, complete = traffic.records, traffic.complete
    details.is_interrupted = traffic.is_interrupted or traffic.is_gone
    details.distributions = distributions(complete)
    details.steady = steady(complete, traffic.duration)
    arrived, late = [one.arrived for one in records], [one.late for one in records]
    details.arrivals = settings.arrivals.check(arrived, late)
    details.goodput = goodput(settings.limits, complete, len(records), traffic.duration)
    details.timeline = {
        **timeline(records, traffic.duration),
        "k_histograms": [
            {"seconds": seconds, "rounds": counters.since(traffic.before).k_histogram}
            for seconds, counters in traffic.samples
            if traffic.before is not None
        ],
    }
    details.speculation = speculation(traffic)
    growth = traffic.growth
    details.num_compiles = growth.num_compiles if growth is not None else None
    details.failures = count_failures([one.error for one in records if one.error])


def speculation(traffic: Traffic) -> Speculation | None:
    """Return counts and times of speculation from the server's metrics and responses.

    Return None if neither the metrics nor the responses have such counts.
    """
    growth, groups = traffic.growth, by_group(traffic.records)
    if growth is None:
        return Speculation(by_group=groups) if groups else None
    accepted = growth.accepted
    return Speculation(
        total=accepted.as_json() if accepted is not None and accepted.num_drafts else None,
        by_group=groups,
        by_source=growth.by_source,
        k_histogram=growth.k_histogram,
        host_ms=growth.ms_per_step(is_wait=False),
        wait_ms=growth.ms_per_step(is_wait=True),
    )


def verify(endpoint: Endpoint, queries: Sequence[Query], traffic: Traffic) -> dict[str, Any]:
    """Send the requests again without drafts, and compare the tokens.

    If tokens differ, `tell_ties` decides whether this is a rounding difference or a mismatch.

    Raises:
        ValueError: the server drafted although the requests ask for no drafts, or it returns no
            token ids.
    """
    fields = {**endpoint.fields, "num_speculative_tokens": 0}
    plain = drive(replace(endpoint, fields=fields), queries, Arrivals())
    growth = plain.growth
    if growth is not None and growth.accepted is not None and growth.accepted.num_drafts:
        raise ValueError("--verify-lossless: the server drafts although it was asked not to")
    found = compare_outputs(traffic.complete, plain.complete)
    if found is None or found["compared"] != "token_ids":
        raise ValueError("--verify-lossless: the server returns no token ids to compare")
    differing = [
        (one, other)
        for one, other in zip(plain.records, traffic.records, strict=False)
        if one.is_complete and other.is_complete and one.token_ids != other.token_ids
    ]
    ties, mismatches = tell_ties(endpoint, differing) if differing else ([], [])
    return {
        "num_outputs": found["num_compared"],
        "num_tokens": sum(record.output_len for record in traffic.complete),
        "near_ties": ties,
        "mismatches": mismatches,
        "plain_seconds": plain.duration,
        "times_plain": None,  # the requests of the two runs arrive differently
    }


def head(settings: LoadSettings, **known: Any) -> dict[str, Any]:
    """Return the date and the settings of a run, under the keys that `vllm bench serve` uses.

    These fields come first in the JSON result. As in vLLM, an infinite rate becomes "inf". If
    requests arrive as in a trace, the rate is "trace".
    """
    arrivals = settings.arrivals
    rate = arrivals.rate if arrivals.rate != float("inf") else "inf"
    result = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": known["backend"],
        "backend": known["backend"],
        "label": known["label"],
        "model_id": known["model"],
        "tokenizer_id": known["tokenizer"],
        "num_prompts": known["num_prompts"],
        **known["metadata"],
        "request_rate": rate if arrivals.trace is None else "trace",
        "burstiness": arrivals.burstiness if arrivals.burstiness != float("inf") else "inf",
        "max_concurrency": settings.max_concurrency,
    }
    if arrivals.ramp is not None:
        result |= {
            "ramp_up_strategy": arrivals.ramp,
            "ramp_up_start_rps": arrivals.start_rate,
            "ramp_up_end_rps": arrivals.end_rate,
        }
    return result
