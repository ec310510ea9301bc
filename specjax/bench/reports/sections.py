"""Makes the content of a report from a result."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from specjax.bench.describe import closing_lines
from specjax.bench.peers.peer import describe_outputs
from specjax.bench.provenance import line as environment_line
from specjax.bench.reports.content import Cell, Chart, Content, Points, Table
from specjax.bench.reports.saved import Saved
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
_ACCEPTED = {
    "num_drafts": "rounds",
    "num_draft_tokens": "drafts",
    "num_accepted": "accepted",
    "acceptance_rate": "rate",
    "acceptance_length": "tokens per round",
}
_COMPARED = {
    "tokens_per_second": "tokens/s",
    "plain_tokens_per_second": "plain tokens/s",
    "times_plain": "x plain",
    "ms_per_step": "ms/step",
    "plain_steps": "plain steps",
    "mean_acceptance_length": "tokens per step",
}


def content_of(saved: Saved) -> Content:
    """Return the content of a result's report."""
    if saved.details is None:
        return _of_speculation(saved.top)
    top, details, found = saved.top, saved.details, saved.details.speculation
    tables = [_figures(top, details.rounds), _times(details), *_windows(details)]
    charts = _charts_of_time(details)
    if found is not None:
        tables += _acceptance_tables(found)
        charts = [*_acceptance_charts(found), *charts]
    tables += [_peers(details), *_asides(details.settings, details.environment, details.command)]
    outputs = [f"{one.name} {one.version or ''}: {describe_outputs(one)}" for one in details.peers]
    return Content(
        title=f"specjax bench {saved.benchmark}: {top['model_id']}",
        notes=[*closing_lines(details, top["model_id"]), *outputs, details.timestamp],
        tables=[table.without_empty_columns() for table in tables if table.rows],
        charts=[chart for chart in charts if any(chart.series.values())],
    )


def _figures(top: Mapping[str, Any], rounds: Sequence[Mapping[str, float]]) -> Table:
    rows: list[list[Cell]] = []
    for key, name in FIGURES.items():
        if top.get(key) is not None:
            spread = [one[key] for one in rounds if key in one]
            ends = [min(spread), max(spread)] if len(spread) > 1 else [None, None]
            rows.append([name, top[key], *ends])
    rows += [[f"Seconds, percentile {p}", s, None, None] for p, s in _percentiles(top).items()]
    return Table("Figures", ["", "", "lowest round", "highest round"], rows)


def _percentiles(top: Mapping[str, Any]) -> Mapping[str, float]:
    return top.get("percentiles", {})


def _times(details: Details) -> Table:
    rows = [
        [name, *(getattr(one, figure) for figure in _SUMMARY)]
        for name, one in _measured(details).items()
    ]
    return Table("Requests", ["", *_SUMMARY], rows)


def _measured(details: Details) -> dict[str, Distribution]:
    """Return the distributions with measurements above 0, by name."""
    found = {name: details.distributions.get(key) for key, name in _DISTRIBUTIONS.items()}
    return {name: one for name, one in found.items() if one is not None and one.max > 0}


def _windows(details: Details) -> list[Table]:
    """Return the tables of the steady window and of goodput."""
    steady, good, rows = details.steady or {}, details.goodput, []
    for name in "output_throughput", "mean_running", "ms_per_token", "begin", "end", "rule":
        if steady.get(name) is not None:
            rows.append([name.replace("_", " "), steady[name]])
    tables = [Table("Steady window", ["", ""], rows)]
    if good is not None:
        shares = {name: good["share_by_limit"][name] for name in good["limits_ms"]}
        limits = [[f"{n} within {good['limits_ms'][n]:g} ms", s] for n, s in shares.items()]
        limits.append(["all limits", good["share"]])
        tables.append(Table("Goodput", ["", "share of requests"], limits))
    return tables


def _acceptance_tables(found: Speculation) -> list[Table]:
    named = {name: one for name, one in _acceptance(found).items() if one is not None}
    if len(found.by_source) > 1:
        named |= found.by_source
    most = max((len(one.get("rates_per_position", ())) for one in named.values()), default=0)
    rows = []
    for name, one in named.items():
        rates = [*one.get("rates_per_position", ()), *[None] * most][:most]
        rows.append([name, *(one[key] for key in _ACCEPTED), *rates])
    positions = [f"position {i + 1}" for i in range(most)]
    ks = sorted({*found.k_histogram, *found.ms_per_round, *found.round_over_plain}, key=int)
    by_k = found.k_histogram, found.ms_per_round, found.round_over_plain
    steps = {"host": found.host_ms, "waiting": found.wait_ms, "device, at most": found.device_ms}
    return [
        Table("Acceptance", ["", *_ACCEPTED.values(), *positions], rows),
        Table(
            "Rounds by K",
            ["K", "rounds", "ms", "plain steps"],
            [[k, *(one.get(k) for one in by_k)] for k in ks],
        ),
        Table(
            "A step", ["", "ms"], [[name, ms] for name, ms in steps.items() if ms is not None]
        ),
    ]  # fmt: skip


def _acceptance(found: Speculation) -> dict[str, Any]:
    """Return the counts of all requests, and of each group that has a name."""
    return {"all": found.total, **{name: one for name, one in found.by_group.items() if name}}


def _acceptance_charts(found: Speculation) -> list[Chart]:
    rates = {
        name: [(i + 1, rate) for i, rate in enumerate(one["rates_per_position"])]
        for name, one in _acceptance(found).items()
        if one is not None
    }
    histogram = [(int(k), count) for k, count in found.k_histogram.items()]
    costs = [(int(k), ms) for k, ms in found.ms_per_round.items()]
    return [
        Chart("Acceptance by position", "position", "share of rounds", rates, is_bars=True),
        Chart("Rounds by K", "K", "rounds", {"": histogram}, is_bars=True),
        Chart("Time of a round by K", "K", "ms", {"": costs}, is_bars=True),
    ]


def _charts_of_time(details: Details) -> list[Chart]:
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
    for name, one in _measured(details).items():
        steps = [(value, percent / 100) for percent, value in enumerate(one.quantiles)]
        charts.append(Chart(name, "at most", "share", {"": steps}))
    return charts


def _mean_k(samples: Sequence[Mapping[str, Any]]) -> Points:
    """Return the mean K between two samples of the server's counters, by the later one's second."""
    points = []
    for before, after in pairwise([{"rounds": {}}, *samples]):
        growth = {int(k): n - before["rounds"].get(k, 0) for k, n in after["rounds"].items()}
        if rounds := sum(growth.values()):
            mean = sum(k * count for k, count in growth.items()) / rounds
            points.append((after["seconds"], mean))
    return points


def _peers(details: Details) -> Table:
    peers = details.peers
    keys = [key for key in FIGURES if any(key in peer.ratios for peer in peers)]
    rows = [
        [FIGURES[key], *(one.figures.get(key) for one in peers), *(p.ratios.get(key) for p in peers)]
        for key in keys
    ]
    header = ["", *(one.name for one in peers), *(f"specjax over {one.name}" for one in peers)]
    return Table("Other engines", header, rows)


def _asides(
    settings: Mapping[str, Any], environment: Mapping[str, Any], command: Sequence[str]
) -> list[Table]:
    tables = [
        Table(title, ["", ""], [[k, _plain(v)] for k, v in found.items()], is_aside=True)
        for title, found in {"Settings": settings, "Environment": environment}.items()
    ]
    return [*tables, Table("Command", [""], [[" ".join(["specjax", *command])]], is_aside=True)]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _of_speculation(top: Mapping[str, Any]) -> Content:
    settings, rows = top["settings"], top["configurations"]
    versions = {"commit": None, **top["environment"]}
    same = "yes" if top["outputs_identical"] else "NO"
    notes = [
        *(f"DO NOT TRUST THESE TIMES: {doubt}" for doubt in top["machine"]["doubts"]),
        *(["interrupted: the figures cover what was measured"] if top["is_interrupted"] else []),
        f"same tokens as plain decoding: {same}",
        f"{settings['num_prompts']} prompts, batch size {settings['batch_size']}",
        environment_line(versions),
        top["timestamp"],
    ]
    rates = {
        one["configuration"]: [(i + 1, r) for i, r in enumerate(one["acceptance_per_position"])]
        for one in rows
        if one["k"]
    }
    speeds: dict[str, list[tuple[float, float]]] = {}
    for one in rows:
        speeds.setdefault(one["method"], []).append((one["k"], one["tokens_per_second"]))
    table = [[one["configuration"], *(one[key] for key in _COMPARED)] for one in rows]
    return Content(
        title=f"specjax bench speculation: {settings['model']}",
        notes=notes,
        tables=[
            Table("Plain decoding and drafters", ["", *_COMPARED.values()], table),
            *_asides(settings, top["environment"], ["bench"]),
        ],
        charts=[
            Chart("Tokens per second by K", "K", "tokens/s", speeds, is_bars=True),
            Chart("Acceptance by position", "position", "share of steps", rates, is_bars=True),
        ],
    )
