"""Reads results of `specjax bench` from JSON files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.bench.comparison import SCHEMA_VERSION as SPECULATION_VERSION
from specjax.bench.result import KEY, SCHEMA_VERSION, Details, Distribution, Peer, Speculation

SPECULATION, CELLS = "speculation", "sweep serve"
_VERSIONS = {
    **dict.fromkeys(("latency", "throughput", "serve", CELLS), SCHEMA_VERSION),
    SPECULATION: SPECULATION_VERSION,
}
_OF_SPECULATION = (
    *("settings", "environment", "machine", "configurations", "timestamp"),
    *("is_interrupted", "outputs_identical"),
)


@dataclass(frozen=True)
class Saved:
    """A result that was read from a file.

    Attributes:
        benchmark: "latency", "throughput", "serve", "sweep serve" or "speculation".
        top: the whole JSON object.
        details: the object under the key "specjax"; None for results of `bench speculation` and
            `bench sweep serve`, which have no such details.
        cells: the results of `bench serve` in a result of `bench sweep serve`; empty for other
            benchmarks.
    """

    benchmark: str
    top: Mapping[str, Any]
    details: Details | None
    cells: Sequence["Saved"] = ()


def read(path: str) -> Saved:
    """Read the file of a result.

    Raises:
        ValueError: the file is not a result of a benchmark, or has another schema version.
        OSError: the file cannot be read.
    """
    try:
        return parse(Path(path).expanduser().read_text(encoding="utf-8"), path)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text; name the JSON of a result") from None


def parse(text: str, path: str) -> Saved:
    """Return the result in a JSON text. Error messages name `path`, the file of the text.

    Raises:
        ValueError: the text is not a result of a benchmark, or has another schema version.
    """
    try:
        top = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); name the JSON of a result") from None
    return _saved(top, path)


def _saved(top: Any, path: str) -> Saved:
    body = top.get(KEY, top) if isinstance(top, dict) else None
    benchmark = body.get("benchmark") if isinstance(body, dict) else None
    if body is None or benchmark not in _VERSIONS:
        raise ValueError(
            f"{path} is not a result of specjax bench {', '.join(_VERSIONS)}; write one with "
            "--output-json, or --output for speculation"
        )
    version = body.get("schema_version")
    if version != _VERSIONS[benchmark]:
        raise ValueError(
            f"{path} has schema_version {version}, and this version of specjax reads "
            f"{_VERSIONS[benchmark]}; measure again"
        )
    needed = {SPECULATION: _OF_SPECULATION, CELLS: ("model_id", "results")}.get(
        benchmark, ("model_id",)
    )
    if lacking := [key for key in needed if key not in top]:
        raise ValueError(f"{path} is damaged, it lacks {', '.join(lacking)}; measure again")
    if benchmark == SPECULATION:
        return Saved(benchmark, top, None)
    if benchmark == CELLS:
        return Saved(benchmark, top, None, [_saved(one, path) for one in top["results"]])
    try:
        return Saved(benchmark, top, _details(body))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); measure again") from None


def _details(body: Mapping[str, Any]) -> Details:
    """Return the `Details` that `body`, the object under the key "specjax", describes."""
    found, speculation = body["distributions"], body["speculation"]
    distributions = {name: one and Distribution(**one) for name, one in found.items()}
    return Details(
        **{
            **body,
            "distributions": distributions,
            "speculation": speculation and Speculation(**speculation),
            "peers": [Peer(**peer) for peer in body["peers"]],
        }
    )
