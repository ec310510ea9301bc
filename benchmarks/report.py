"""Writes results in a common format, and renders RESULTS.md from all results and `GPU_RUNS`.

    python benchmarks/report.py

A result has a title, a description, its provenance, tables, and the samples from which the tables
were computed. A cell of a table is text, a number, or [median, lower quartile, upper quartile].
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from gpu.section import read_lines, render_section

from specjax.bench.environment import describe_environment, package_version

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
GPU_RUNS = "gpu.jsonl", "gpu_h100.jsonl", "gpu_h200.jsonl"  # two of an H100, one of an H200


def provenance(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return the facts on which a result depends, in addition to its settings.

    `packages` names further packages whose versions matter. Call this function before the work,
    because the load average tells whether other programs were running.
    """
    environment = describe_environment()
    environment["versions"] |= {name: package_version(name) for name in packages}
    # The machine's name and the paths of files are private.
    environment["system"] = f"{platform.system()} {platform.machine()}"
    arguments = [Path(a).name if a.startswith("/") else a for a in sys.argv[1:]]
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "load_average": round(os.getloadavg()[0], 2),
        **environment,
    }


def summary(samples: Sequence[float]) -> list[float]:
    """Return a cell: [median, lower quartile, upper quartile]."""
    return [float(np.quantile(samples, q)) for q in (0.5, 0.25, 0.75)]


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write one result atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)


def render(result: Mapping[str, Any]) -> str:
    """Return a result as Markdown."""
    source = result["provenance"]
    versions = ", ".join(f"{name} {v}" for name, v in source["versions"].items())
    lines = [
        f"## {result['title']}",
        "",
        result["description"],
        "",
        f"- Command: `{source['command']}`",
        f"- Machine: {source['cpu_model']}, {source['num_cpus']} cores; JAX on "
        f"{source['device_kind']}; load average {source['load_average']} at the start",
        f"- Versions: {versions}",
        f"- Time and commit: {source['timestamp']}, {source['commit']}",
    ]
    for table in result["tables"]:
        lines += ["", f"### {table['title']}", ""]
        lines += [_row(table["columns"]), _row(["---"] * len(table["columns"]))]
        lines += [_row(map(_cell, row)) for row in table["rows"]]
        lines += ["", *table["notes"]]
    return "\n".join(lines)


def main() -> None:
    """Write RESULTS.md."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    head = "# Results\n\nMade by `python benchmarks/report.py` from `benchmarks/results/`."
    spread = "Cells with a range are median (lower to upper quartile)."
    runs = [read_lines(RESULTS / name) for name in GPU_RUNS]
    if runs[0]:
        from gpu.plot import plot  # imported here, so that other benchmarks do not need matplotlib

        plot(runs[0], FOLDER / "plots" / "gpu.png")
    sections = map(render_section, runs)
    text = "\n\n".join([head, spread, *sections, *map(render, results)])
    (FOLDER / "RESULTS.md").write_text(text + "\n")


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        middle, lower, upper = map(_cell, value)
        return f"{middle} ({lower} to {upper})"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(FOLDER), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changes = " with changes" if git("status", "--porcelain", "--", "..") else ""
        return git("rev-parse", "--short=12", "HEAD") + changes
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    main()
