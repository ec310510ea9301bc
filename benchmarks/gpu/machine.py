"""Describes the provenance of results, without JAX, which would take memory of the card."""

import csv
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "torch", "triton",
    "transformers", "flash-linear-attention", "flashinfer-python", "vllm", "sglang",
)  # fmt: skip
FIXED = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.mem")
MOVING = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


def describe(*, is_cpu: bool, commit: str | None = None) -> dict[str, Any]:
    """Return the provenance of results: command, commit, versions and device.

    The commit is read from git if `commit` is None.
    """
    gpu = None if is_cpu else _query(FIXED)
    return {
        "command": " ".join(["python", "benchmarks/gpu/run.py", *_arguments()]),
        "commit": commit or commit_of(FOLDER.parents[1]),
        "versions": {"python": platform.python_version(), **_versions()},
        "device": gpu["name"] if gpu else platform.machine(),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
    }


def gpu_state() -> dict[str, str] | None:
    """Return the GPU's current clocks, power and temperature; None if they are unknown."""
    return _query(MOVING)


def now() -> str:
    """Return the current date and time as text, for a result line."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _query(fields: tuple[str, ...]) -> dict[str, str] | None:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = list(csv.reader(done.stdout.splitlines(), skipinitialspace=True))
    if done.returncode or not rows or len(rows[0]) != len(fields):
        return None
    return dict(zip(fields, rows[0], strict=True))


def _arguments() -> list[str]:
    return [Path(a).name if a.startswith("/") else a for a in sys.argv[1:]]


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit_of(root: Path) -> str:
    """Return a checkout's commit as text, or "unknown" if git cannot tell it.

    The text ends in "with changes" if there are uncommitted changes.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changes = " with changes" if git("status", "--porcelain") else ""
        return git("rev-parse", "--short=12", "HEAD") + changes
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
