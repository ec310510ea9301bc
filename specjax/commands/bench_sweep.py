"""Runs `specjax bench sweep serve`: `bench serve` at several rates and concurrencies.

The same server answers all runs. A run is called a cell, and has a whole result of `bench serve`.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from specjax.bench.machine import load_now
from specjax.bench.reports import write_report
from specjax.bench.reports.cells import cell_name, text_of_cells
from specjax.bench.reports.saved import parse
from specjax.bench.result import as_json, cells_as_json
from specjax.bench.serve import as_traced
from specjax.bench.traffic.endpoint import Endpoint
from specjax.checkpoint.writing import write_whole
from specjax.commands.bench_load import read_load, result_path
from specjax.commands.bench_serve import Measured, ServeRun, measure, measure_peer, read

_PATIENCE_SECONDS = 30.0


def run(args: argparse.Namespace) -> int:
    """Measure all cells and show them. Return 1 if a request or a peer failed, else 0.

    After an interrupt, or if the server dies, the result covers the cells so far.
    """
    cells, load = read_cells(args), load_now()
    done: list[Measured] = []
    with cells[0].own_server("--rl") as endpoint:  # with it, the prefix cache can be cleared
        for cell in cells:
            note = clear_prefix_cache(endpoint)
            try:
                done.append(measure(cell, endpoint, load))
            except ValueError as error:  # the server is gone; what was measured is kept
                if not done:
                    raise
                done[-1].details.failures[str(error)] = 1
                break
            done[-1].details.dataset["notes"] += note
            if done[-1].details.is_interrupted:
                break
    if len(done) == len(cells) and not done[-1].details.is_interrupted:
        for name in args.against:
            measure_peers(cells, name, done)
    write(args, cells, done)
    if done[-1].traffic.is_interrupted:
        raise KeyboardInterrupt
    return 1 if any(one.details.failures for one in done) else 0


def measure_peers(cells: Sequence[ServeRun], name: str, done: Sequence[Measured]) -> None:
    """Add another engine's figures to each cell.

    If that engine fails, the error is recorded in the last cell of the sweep.
    """
    try:
        with cells[0].peer_server(name) as endpoint:
            for cell, one in zip(cells, done, strict=True):
                notes = [f"{name}: {note}" for note in clear_prefix_cache(endpoint)]
                one.details.dataset["notes"] += notes
                one.details.peers.append(measure_peer(cell, name, endpoint, one))
    except ValueError as error:
        done[-1].details.failures[f"--against {name}: {error}"] = 1


def read_cells(args: argparse.Namespace) -> list[ServeRun]:
    """Read the arguments, and return a run for each pair of a rate and a concurrency.

    Raises:
        ValueError: an option cannot be used, or there is only one pair.
    """
    if args.result_filename:
        raise ValueError("--result-filename names one file, and each cell needs one; leave it out")
    rates = _read("--request-rate", args.request_rate, float, "1,4,inf")
    limits = _read("--max-concurrency", args.max_concurrency, int, "1,8,64")
    given = [
        argparse.Namespace(**{**vars(args), "request_rate": rate, "max_concurrency": limit})
        for rate, limit in product(rates or [float("inf")], limits or [None])
    ]
    if len(given) < 2:
        raise ValueError("--request-rate or --max-concurrency must list several values, like 1,4")
    loads = [read_load(one) for one in given]
    first = read(given[0])
    return [
        replace(
            first, args=one, load=as_traced(load, first.prompts), path=result_path(one, first.model)
        )
        for one, load in zip(given, loads, strict=True)
    ]


def _read(option: str, text: str | None, kind: type, example: str) -> list:
    if text is None:
        return []
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text} must list numbers, like {example}") from None
    if len(set(values)) < len(values):
        raise ValueError(f"{option} {text} has a value twice")
    return values


def clear_prefix_cache(endpoint: Endpoint) -> list[str]:
    """Empty the server's prefix cache, so that a cell finds no prompts of the previous cell.

    Return a list with a note if the server cannot do this, else an empty list.
    """
    url = f"{endpoint.root}/reset_prefix_cache"
    try:
        with urlopen(
            Request(url, data=b"", headers=dict(endpoint.headers)), timeout=_PATIENCE_SECONDS
        ):
            return []
    except (URLError, OSError):
        return ["the server's prefix cache could not be emptied before this run"]


def write(args: argparse.Namespace, cells: Sequence[ServeRun], done: Sequence[Measured]) -> None:
    """Write the files, and print all cells as a table, or as JSON with --json."""
    results = [as_json(one.figures, one.details) for one in done]
    for cell, result in zip(cells, results, strict=False):
        if cell.path is not None:
            text = json.dumps(result, indent=2, default=str)
            write_whole(Path(cell.path).expanduser(), text + "\n")
    text = json.dumps(cells_as_json(cells[0].model, results), indent=2, default=str)
    if args.output_json:
        write_whole(Path(args.output_json).expanduser(), text + "\n")
    saved = parse(text, "sweep serve")
    print(text if args.json else text_of_cells(saved), flush=True)
    if len(done) < len(cells):
        print(f"not measured: {', '.join(cell_name(one.settings) for one in cells[len(done) :])}")
    if args.report:
        write_report(args.report, saved)
