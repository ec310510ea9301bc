"""Makes the content of a report from a result."""

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.bench.describe import closing_lines
from specjax.bench.peers.peer import describe_outputs
from specjax.bench.provenance import line as environment_line
from specjax.bench.reports.cells import content_of_cells
from specjax.bench.reports.charts import acceptance_charts, charts_of_time
from specjax.bench.reports.content import Chart, Content, ReportTable, in_words
from specjax.bench.reports.saved import Saved
from specjax.bench.reports.tables import (
    ACCEPTED,
    acceptance_tables,
    figures,
    peer_table,
    times,
    windows,
)

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
    if saved.cells:
        return content_of_cells(saved)
    if saved.details is None:
        return _of_speculation(saved.top)
    top, details, found = saved.top, saved.details, saved.details.speculation
    tables = [figures(top, details.rounds), times(details), *windows(details)]
    charts = charts_of_time(details)
    if found is not None:
        tables += acceptance_tables(found)
        charts = [*acceptance_charts(found), *charts]
    tables += [
        peer_table(details),
        *_asides(details.settings, details.environment, details.command),
    ]
    outputs = [f"{one.name} {one.version or ''}: {describe_outputs(one)}" for one in details.peers]
    return Content(
        title=f"specjax bench {saved.benchmark}: {top['model_id']}",
        notes=[*closing_lines(details, top["model_id"]), *outputs, details.timestamp],
        tables=tables,
        charts=charts,
    )


def _asides(
    settings: Mapping[str, Any], environment: Mapping[str, Any], command: Sequence[str]
) -> list[ReportTable]:
    tables = [
        ReportTable(title, ["", ""], [[k, in_words(v)] for k, v in found.items()], is_aside=True)
        for title, found in {"Settings": settings, "Environment": environment}.items()
    ]
    return [
        *tables,
        ReportTable("Command", [""], [[" ".join(["specjax", *command])]], is_aside=True),
    ]


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
    sources = [
        [f"{one['configuration']}: {name}", *(of[key] for key in ACCEPTED)]
        for one in rows
        for name, of in one.get("by_source", {}).items()
    ]
    table = [[one["configuration"], *(one[key] for key in _COMPARED)] for one in rows]
    return Content(
        title=f"specjax bench speculation: {settings['model']}",
        notes=notes,
        tables=[
            ReportTable("Plain decoding and drafters", ["", *_COMPARED.values()], table),
            ReportTable("Acceptance by source", ["", *ACCEPTED.values()], sources),
            *_asides(settings, top["environment"], ["bench"]),
        ],
        charts=[
            Chart("Tokens per second by K", "K", "tokens/s", speeds, is_bars=True),
            Chart("Acceptance by position", "position", "share of steps", rates, is_bars=True),
        ],
    )
