"""The provenance of results, found without using the card, whose memory is for the cases."""

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
    """Return commit (unless given), versions and device."""
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
    """Return current clocks, power and temperature; None if unknown."""
    return _query(MOVING)


def now() -> str:
    """Return the current date, for a result line."""
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
    """Return a checkout's commit, and whether it has changes; "unknown" without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changes = " with changes" if git("status", "--porcelain") else ""
        return git("rev-parse", "--short=12", "HEAD") + changes
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
