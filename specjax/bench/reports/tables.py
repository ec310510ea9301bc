"""Makes the tables of a report from the `Details` of a result."""

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.bench.reports.content import Cell, ReportTable
from specjax.bench.result import Details, Distribution, Speculation

FIGURES = {  # the names of figures, by key
    "requests_per_second": "Requests per second",
    "output_tokens_per_second": "Output tokens per second",
    "tokens_per_second": "All tokens per second",
    "elapsed_time": "Seconds",
    "avg_latency": "Mean seconds of a batch",
    "completed": "Complete requests",
    "failed": "Failed requests",
    "duration": "Seconds",
    "request_throughput": "Requests per second",
    "request_goodput": "Requests per second within limits",
    "output_throughput": "Output tokens per second",
    "total_token_throughput": "All tokens per second",
    "max_output_tokens_per_s": "Output tokens in the best second",
    "max_concurrent_requests": "Requests at a time, at most",
}
_DISTRIBUTIONS = {
    "ttft_ms": "Time to first token (TTFT), ms",
    "tpot_ms": "Time per output token (TPOT), ms",
    "itl_ms": "Time between chunks (ITL), ms",
    "e2el_ms": "End-to-end latency (E2EL), ms",
    "queue_ms": "Waiting in the client, ms",
    "tokens_per_chunk": "Tokens per chunk",
}
_SUMMARY = "mean", "median", "std", "p90", "p99", "max"
ACCEPTED = {
    "num_drafts": "rounds",
    "num_draft_tokens": "drafts",
    "num_accepted": "accepted",
    "acceptance_rate": "rate",
    "acceptance_length": "tokens per round",
}


def figures(top: Mapping[str, Any], rounds: Sequence[Mapping[str, float]]) -> ReportTable:
    """Return a table of the main figures.

    With several rounds, the table also has the lowest and the highest value of a figure in any
    round.
    """
    rows: list[list[Cell]] = []
    for key, name in FIGURES.items():
        if top.get(key) is not None:
            spread = [one[key] for one in rounds if key in one]
            ends = [min(spread), max(spread)] if len(spread) > 1 else [None, None]
            rows.append([name, top[key], *ends])
    percentiles = top.get("percentiles", {}).items()
    rows += [[f"Seconds, percentile {p}", seconds, None, None] for p, seconds in percentiles]
    return ReportTable("Figures", ["", "", "lowest round", "highest round"], rows)


def times(details: Details) -> ReportTable:
    """Return a table with the mean, median, std, p90, p99 and maximum of each distribution."""
    rows = [
        [name, *(getattr(one, figure) for figure in _SUMMARY)]
        for name, one in measured(details).items()
    ]
    return ReportTable("Requests", ["", *_SUMMARY], rows)


def measured(details: Details) -> dict[str, Distribution]:
    """Return the distributions that have a value above 0, by their names in reports."""
    found = {name: details.distributions.get(key) for key, name in _DISTRIBUTIONS.items()}
    return {name: one for name, one in found.items() if one is not None and one.max > 0}


def windows(details: Details) -> list[ReportTable]:
    """Return the table of the steady window, and the table of goodput if the result has goodput.

    The steady window is the time in which the number of running requests is about constant. Its
    table is empty if the result has no such window. The table of goodput has the share of requests
    that meet each latency limit.
    """
    steady, good, rows = details.steady or {}, details.goodput, []
    for name in "output_throughput", "mean_running", "ms_per_token", "begin", "end", "rule":
        if steady.get(name) is not None:
            rows.append([name.replace("_", " "), steady[name]])
    tables = [ReportTable("Steady window", ["", ""], rows)]
    if good is not None:
        shares = {name: good["share_by_limit"][name] for name in good["limits_ms"]}
        limits = [[f"{n} within {good['limits_ms'][n]:g} ms", s] for n, s in shares.items()]
        limits.append(["all limits", good["share"]])
        tables.append(ReportTable("Goodput", ["", "share of requests"], limits))
    return tables


def acceptance_tables(found: Speculation) -> list[ReportTable]:
    """Return tables of draft acceptance, of rounds by K, and of the times of an engine step."""
    named = {name: one for name, one in acceptance(found).items() if one is not None}
    if len(found.by_source) > 1:
        named |= found.by_source
    most = max((len(one.get("rates_per_position", ())) for one in named.values()), default=0)
    rows = []
    for name, one in named.items():
        rates = [*one.get("rates_per_position", ()), *[None] * most][:most]
        rows.append([name, *(one[key] for key in ACCEPTED), *rates])
    positions = [f"position {i + 1}" for i in range(most)]
    ks = sorted({*found.k_histogram, *found.ms_per_round, *found.round_over_plain}, key=int)
    by_k = found.k_histogram, found.ms_per_round, found.round_over_plain
    steps = {"host": found.host_ms, "waiting": found.wait_ms, "device, at most": found.device_ms}
    return [
        ReportTable("Acceptance", ["", *ACCEPTED.values(), *positions], rows),
        ReportTable(
            "Rounds by K",
            ["K", "rounds", "ms", "plain steps"],
            [[k, *(one.get(k) for one in by_k)] for k in ks],
        ),
        ReportTable(
            "A step", ["", "ms"], [[name, ms] for name, ms in steps.items() if ms is not None]
        ),
    ]


def acceptance(found: Speculation) -> dict[str, Any]:
    """Return the counts of draft tokens, of all requests and of each group of the data set.

    Requests without a group count only under "all".
    """
    return {"all": found.total, **{name: one for name, one in found.by_group.items() if name}}


def peer_table(details: Details) -> ReportTable:
    """Return a table of other engines' figures, and of this engine's figures divided by them."""
    peers = details.peers
    keys = [key for key in FIGURES if any(key in peer.ratios for peer in peers)]
    rows = [
        [
            FIGURES[key],
            *(one.figures.get(key) for one in peers),
            *(p.ratios.get(key) for p in peers),
        ]
        for key in keys
    ]
    header = ["", *(one.name for one in peers), *(f"specjax over {one.name}" for one in peers)]
    return ReportTable("Other engines", header, rows)
