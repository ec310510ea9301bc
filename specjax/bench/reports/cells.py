"""The report of `specjax bench sweep serve`: charts of throughput, and a table with a row per cell.

A cell is a run of `specjax bench serve` with one rate and one concurrency.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specjax.bench.describe import DOUBT, closing_lines
from specjax.bench.peers.peer import describe_outputs
from specjax.bench.reports.content import Cell, Chart, Content, ReportTable, shown
from specjax.bench.reports.saved import Saved
from specjax.bench.table import format_table

_OWN = "specjax"
_LATENCY = re.compile(r"(median|p([\d.]+))_(ttft|tpot|itl|e2el)_ms")


def content_of_cells(saved: Saved) -> Content:
    """Return the content of the report of a sweep."""
    return Content(
        title=f"specjax bench sweep serve: {saved.top['model_id']}",
        notes=[*_notes(saved.cells), saved.top["specjax"]["timestamp"]],
        tables=[_table(saved.cells)],
        charts=_charts(saved.cells),
    )


def text_of_cells(saved: Saved) -> str:
    """Return the report's table and notes as text."""
    table = _table(saved.cells).without_empty_columns()
    rows = [[shown(cell) for cell in row] for row in table.rows]
    return "\n".join([format_table([table.header, *rows]), *_notes(saved.cells)])


def cell_name(top: Mapping[str, Any]) -> str:
    """Return the name of a cell, from the request_rate and the max_concurrency in `top`."""
    rate, limit = top["request_rate"], top["max_concurrency"]
    name = rate if isinstance(rate, str) else f"{rate:g} requests/s"
    name = "all at once" if rate in ("inf", float("inf")) else name
    return name if limit is None else f"{name}, {limit} at a time"


def _notes(cells: Sequence[Saved]) -> list[str]:
    """Return a line that names the run with the most goodput, and the closing lines of all runs.

    Each run is a cell: `bench serve` with one rate and one concurrency. Equal lines occur once. The
    last lines say, for each cell and peer, how many outputs were equal.
    """
    lines: list[str] = []
    good = {cell_name(one.top): one.top["request_goodput"] or 0.0 for one in cells}
    if any(good.values()):
        best = max(good, key=lambda name: good[name])
        lines.append(f"most requests/s within all limits: {good[best]:.2f}, with {best}")
    closing = [
        closing_lines(one.details, one.top["model_id"]) for one in cells if one.details is not None
    ]
    doubts = [of[0] for of in closing if of[0].startswith(DOUBT)]
    if doubts:
        lines.append(f"in {len(doubts)} of {len(cells)} cells, {doubts[0]}")
    lines += [line for of in closing for line in of if not line.startswith(DOUBT)]
    lines += [
        f"{cell_name(one.top)}, {peer.name}: {describe_outputs(peer)}"
        for one in cells
        for peer in (one.details.peers if one.details is not None else ())
    ]
    return list(dict.fromkeys(lines))


def _engines(cell: Saved) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield pairs of a name and figures: for this engine, then for each peer (another engine)."""
    yield _OWN, cell.top
    for peer in cell.details.peers if cell.details is not None else ():
        yield peer.name, peer.figures


def _latencies(top: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return two statistics of each latency: the median and the highest percentile.

    A statistic is a pair: its name, and its key in the result.
    """
    found: dict[str, list[tuple[float, str, str]]] = {}
    for key in top:
        if match := _LATENCY.fullmatch(key):
            order = float(match[2]) if match[2] else 0.0  # the median comes first
            found.setdefault(match[3], []).append((order, match[1], key))
    pairs = {name: sorted(ones) for name, ones in found.items()}
    return {
        name: [one[1:] for one in dict.fromkeys((ones[0], ones[-1]))]
        for name, ones in pairs.items()
    }


def _table(cells: Sequence[Saved]) -> ReportTable:
    columns = {"request_throughput": "requests/s", "output_throughput": "output tokens/s"}
    for name, pairs in _latencies(cells[0].top).items():
        columns |= {key: f"{statistic} {name.upper()} ms" for statistic, key in pairs}
    columns |= {
        "request_goodput": "within limits/s",
        "spec_decode_acceptance_length": "tokens per round",
        "failed": "failed",
    }
    rows: list[list[Cell]] = []
    for cell in cells:
        for engine, figures in _engines(cell):
            name = cell_name(cell.top) + ("" if engine == _OWN else f", {engine}")
            rows.append([name, *(figures.get(key) for key in columns)])
    return ReportTable("Cells", ["", *columns.values()], rows)


def _charts(cells: Sequence[Saved]) -> list[Chart]:
    """Return a chart for each latency metric, such as TTFT.

    Each line of a chart has a point for each cell, with the cell's latency as x and its throughput
    as y.
    """
    has_peers = any(len(list(_engines(cell))) > 1 for cell in cells)
    rates, limits = (
        len({cell.top[key] for cell in cells}) for key in ("request_rate", "max_concurrency")
    )
    charts = []
    for latency, pairs in _latencies(cells[0].top).items():
        series: dict[str, list[tuple[float, float]]] = {}
        for cell in cells:
            limit = f"{cell.top['max_concurrency']} at a time" if min(rates, limits) > 1 else ""
            for engine, figures in _engines(cell):
                for statistic, key in pairs[:1] if has_peers else pairs:
                    parts = [engine if has_peers else "", statistic, limit]
                    point = figures[key], figures["output_throughput"]
                    series.setdefault(", ".join(filter(None, parts)), []).append(point)
        title = f"Throughput against {latency.upper()}"
        charts.append(Chart(title, f"{latency.upper()}, ms", "output tokens/s", series))
    return charts
