"""Runs timings on an H100 or H200; by default, those that fit in ten minutes.

    python benchmarks/gpu/run.py                  all that fits the budget, most informative first
    python benchmarks/gpu/run.py --only grid      cases by name or group, in the order given
    python benchmarks/gpu/run.py --cpu            tiny shapes on a CPU, to see that the code runs
    python benchmarks/gpu/run.py --pair FOLDER    compares with an old checkout, see `pairs`

Every case is a separate process, which is killed with all its children when its time is up. Each
result is written immediately to --output, as a line of JSON with its provenance. A failure is
written in the same way, with the end of the process's output. The exit status tells whether cases
hung. `plan` prints commands that fit into a number of minutes on a machine.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pairs
from cases import Case, select
from machine import commit_of, describe, gpu_state, now

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
OUTPUT = FOLDER.parent / "results" / "gpu.jsonl"
BUDGET = 540.0
MAX_HUNG = 2  # after this number of cases in a row that reach their limit, the card hangs
HUNG = 10  # the exit status is this plus the number of last cases that hung, if any
MARK = "RESULT "  # marks the lines of a case's output that are results
TAIL = 1500  # maximum number of characters of a failed case's output to keep


class Results:
    """Writes the file of result lines, and keeps the card's copy bandwidth once it is measured."""

    def __init__(self, path: Path, provenance: Mapping[str, Any]):
        self._path, self._provenance = path, provenance
        self._lock = threading.Lock()
        self._copy_gbps = _known_bandwidth(path, provenance)
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, case: Case, status: str, seconds: float, **fields: Any) -> None:
        """Write a line.

        If the line has a figure in GB/s, add the figure as a fraction of the card's copy bandwidth.
        """
        with self._lock:
            if fields.get("what") == "copy" and "gbps" in fields:
                self._copy_gbps = fields["gbps"]
            if self._copy_gbps and fields.get("gbps"):
                fields["of_copy"] = fields["gbps"] / self._copy_gbps
            line = {
                "case": case.name,
                "status": status,
                "seconds": round(seconds, 2),
                "date": now(),
                **fields,
                "provenance": self._provenance,
            }
            with self._path.open("a") as file:
                file.write(json.dumps(line, default=str) + "\n")
        shown = {k: _short(v) for k, v in fields.items() if k not in ("gpu", "stderr")}
        print(f"{seconds:7.1f} s  {case.name:20} {status:8}", shown, flush=True)
        if "stderr" in fields:
            print(fields["stderr"], flush=True)


@dataclass(frozen=True)
class Checkout:
    """A folder with the sources that cases run with, and the file for their results."""

    root: Path
    results: Results


def run_cases(
    cases: Sequence[Case],
    checkouts: Sequence[Checkout],
    *,
    budget: float,
    is_cpu: bool,
    cache: Path,
) -> int:
    """Run cases in turn while the budget lasts, and record cases that do not run.

    Each case runs once for every item of `checkouts`, which may have duplicates, before the next
    case. After `MAX_HUNG` cases in a row have hung, no other case runs. Return how many of the last
    cases hung in a row.
    """
    start, num_hung = time.monotonic(), 0
    for case in cases:
        for one in checkouts:
            left = budget - (time.monotonic() - start)
            reason = None
            if num_hung == MAX_HUNG:
                reason = f"{MAX_HUNG} cases hung"
            elif left < min(case.least, case.seconds):
                reason = f"{max(left, 0):.0f} s of budget left"
            if reason:
                one.results.append(case, "skipped", 0.0, reason=reason)
                continue
            limit = min(case.seconds, left)
            has_hung = run_case(case, one, limit=limit, is_cpu=is_cpu, cache=cache)
            num_hung = num_hung + 1 if has_hung else 0
    return num_hung


def run_case(case: Case, checkout: Checkout, *, limit: float, is_cpu: bool, cache: Path) -> bool:
    """Run a case's process; write its results, and a line about its end. Return whether it hung."""
    results, given = checkout.results, []
    setting = {"function": case.function, "is_cpu": is_cpu, "arguments": dict(case.arguments)}
    start, before = time.monotonic(), gpu_state()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, str(FOLDER / "one_case.py"), json.dumps(setting)],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            errors="replace",
            env=_environment(case, checkout.root, is_cpu=is_cpu, cache=cache),
            process_group=0,  # a separate group, which can be killed as a whole
        )

        def read() -> None:
            assert process.stdout
            with process.stdout as lines:
                for line in lines:
                    if line.startswith(MARK) and line.endswith("\n"):  # not cut off by a kill
                        row = json.loads(line.removeprefix(MARK))
                        given.append(row["what"])
                        results.append(case, "result", time.monotonic() - start, **row)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            code = process.wait(timeout=limit)
            status = "done" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            code, status = None, "timeout"
        finally:
            _kill(process)
        reader.join(timeout=10)
        fields: dict[str, Any] = {"gpu": {"before": before, "after": gpu_state()}}
        if status != "done":
            said.seek(0)
            tail = said.read()[-TAIL:].replace(str(checkout.root), ".").replace(str(ROOT), ".")
            fields |= {"code": code, "limit": round(limit, 1), "stderr": tail}
        results.append(case, status, time.monotonic() - start, **fields)
    return status == "timeout" and not given


def _kill(process: subprocess.Popen) -> None:
    """Kill a process and all its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:  # stuck in the driver; the next case may still run
        pass


def _environment(case: Case, root: Path, *, is_cpu: bool, cache: Path) -> dict[str, str]:
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",  # XLA's lines would displace a failure's reason
        **case.environment,
    }
    if is_cpu:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")  # not the flags for a GPU
    return environment


def _known_bandwidth(path: Path, provenance: Mapping[str, Any]) -> float | None:
    """Return the copy bandwidth that an earlier run measured on the same kind of card.

    Return None if the file `path` has no such line.
    """
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return None
    device = provenance.get("device")
    found = [
        line["gbps"]
        for line in lines
        if line.get("what") == "copy" and line["provenance"].get("device") == device
    ]
    return found[-1] if found else None


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> int:
    """Run the selected cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases or groups, see --list")
    parser.add_argument("--list", action="store_true", help="the cases, and do nothing")
    parser.add_argument("--output", type=Path, help=f"default: results/{OUTPUT.name}")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds; %(default)s")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="for compiled programs; default: a new one"
    )
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument(
        "--pair", type=Path, metavar="FOLDER", help="a checkout of the commit to compare with"
    )
    settings = parser.parse_args()
    try:
        cases = select(settings.only)
    except ValueError as error:
        parser.error(str(error))
    if settings.cpu and not settings.only:
        cases = [case for case in cases if case.on_cpu]
    if settings.list:
        for case in cases:
            print(f"{case.name:20} {case.seconds:5.0f} s  {case.about}")
        print(f"{'':20} {sum(case.seconds for case in cases):5.0f} s if all took their limits")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the case that runs, too
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        usual = pairs.OUTPUT if settings.pair else OUTPUT
        output = settings.output or (Path(folder) / "cpu.jsonl" if settings.cpu else usual)
        source = describe(is_cpu=settings.cpu, commit=settings.commit)
        checkouts = [Checkout(ROOT, Results(output, source))]
        if settings.pair:
            checkouts = _pair(settings.pair.resolve(), output, source) * pairs.ROUNDS
        cache = (settings.cache or Path(folder) / "jax").resolve()
        num_hung = run_cases(
            cases, checkouts, budget=settings.budget, is_cpu=settings.cpu, cache=cache
        )
        if settings.pair:
            print(pairs.show(map(json.loads, output.read_text().splitlines())))
    return HUNG + num_hung if num_hung else 0


def _pair(other: Path, output: Path, source: Mapping[str, Any]) -> list[Checkout]:
    """Return the checkout `other` (old) and this checkout (new).

    Each of their result lines names both commits.
    """
    commits = {"old": commit_of(other), "new": source["commit"]}
    return [
        Checkout(root, Results(output, {**source, "commit": commits[side],
                                        "pair": {"side": side, **commits}}))
        for side, root in (("old", other), ("new", ROOT))
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
