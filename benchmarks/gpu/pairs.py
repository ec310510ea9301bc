"""Compares the times of two commits: prints the ratio of old to new time of each measurement.

    python benchmarks/gpu/run.py --pair OTHER_CHECKOUT --only kernels/others
    python benchmarks/gpu/pairs.py                 prints the ratios again

Every case runs twice with the old sources and twice with the new sources, in turn and in separate
processes. The sources are specjax and pallas_kernels. The benchmarks are always this checkout's.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

OUTPUT = Path(__file__).resolve().parents[1] / "results" / "gpu_pairs.jsonl"
ROUNDS = 2
# Lines with equal values of these fields are measurements of the same thing.
SETTINGS = ("what", "model", "shape", "dtype", "batch", "rows", "context", "k", "way", "buffers",
            "config", "part", "tokens", "dim", "size", "peer", "message")  # fmt: skip
TIMES = (
    "device_us",
    "wall_us",
    "ms_per_step",
    "ms",
    "steps_ms",
)  # of these fields, the first that a line has is compared

Line = Mapping[str, Any]


def key(line: Line) -> tuple[str, ...]:
    """Return a key that all lines of the same measurement have in common."""
    return line["case"], *(str(line.get(name)) for name in SETTINGS)


def ratios(lines: Iterable[Line]) -> list[tuple[str, float, float]]:
    """Return a tuple (name, old time, new time) for each measurement of both commits.

    The times are medians over rounds. Only lines of the last pair of commits count.
    """
    paired = [line for line in lines if "pair" in line["provenance"] and line["status"] == "result"]
    if not paired:
        return []
    commits = _commits(paired[-1])
    times: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in paired:
        if _commits(line) == commits and (found := time_of(line)):
            times[key(line)][line["provenance"]["pair"]["side"]].append(found)
    return [
        (" ".join(word for word in name if word != "None"), median(of["old"]), median(of["new"]))
        for name, of in times.items()
        if {"old", "new"} <= of.keys()
    ]


def time_of(line: Line) -> float | None:
    """Return the time in a line; None if the measurement failed, or if the line has no time."""
    found = next((line[name] for name in TIMES if line.get(name)), None)
    return found["median"] if isinstance(found, Mapping) else found


def show(lines: Iterable[Line]) -> str:
    """Return the ratios as text, with a line for each measurement."""
    rows = [f"{old:10.4g} {new:10.4g} {old / new:7.3f}  {name}" for name, old, new in ratios(lines)]
    return "\n".join([f"{'old':>10} {'new':>10} {'old/new':>7}", *rows])


def _commits(line: Line) -> tuple[str, str]:
    pair = line["provenance"]["pair"]
    return pair["old"], pair["new"]


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    print(show(map(json.loads, file.read_text().splitlines())))
