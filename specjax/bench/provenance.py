"""Adds the GPU's clocks and the commit of the source code to the description in `environment`."""

import platform
import subprocess
from pathlib import Path
from typing import Any

from specjax.bench.environment import (
    cpu_model,
    describe_environment,
    describe_processors,
    describe_versions,
    num_cpus,
)
from specjax.device.instructions import cpu_instructions

_PATIENCE_SECONDS = 10.0
_CLOCKS = (
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("power.draw", "power.limit", "temperature.gpu", "driver_version"),
)


def describe() -> dict[str, Any]:
    """Return versions, devices, the processor, the GPU's clocks and the commit, as plain types."""
    environment = describe_environment()
    clocks = read_clocks() if environment["platform"] == "gpu" else []
    return environment | {"clocks": clocks, "commit": read_commit()}


def describe_client() -> dict[str, Any]:
    """Return what `describe` returns, without initialising JAX's devices.

    JAX would reserve GPU memory, which a server on this machine may need. The GPUs are read
    from nvidia-smi, which also lists GPUs that the server does not use. Without nvidia-smi, the
    machine is described as a CPU.
    """
    names = (_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines()
    return {
        "versions": describe_versions(),
        "platform": "gpu" if names else "cpu",
        "device_kind": names[0] if names else "cpu",
        "num_devices": len(names) or 1,
        "cpu_model": cpu_model(),
        "cpu_instructions": cpu_instructions(),
        "num_cpus": num_cpus(),
        "system": platform.platform(),
        "clocks": read_clocks() if names else [],
        "commit": read_commit(),
    }


def read_commit() -> str | None:
    """Return the commit of this source checkout, with "+" after it if tracked files were changed.

    Return None for an installed package, or without git.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # an installed package
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit


def read_clocks() -> list[dict[str, str]]:
    """Return clocks (MHz), power (W), temperature and driver of each GPU; empty if unknown."""
    query = f"--query-gpu={','.join(_CLOCKS)}"
    listed = _output("nvidia-smi", query, "--format=csv,noheader,nounits") or ""
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines()]
    return [dict(zip(_CLOCKS, row, strict=True)) for row in rows if len(row) == len(_CLOCKS)]


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def line(environment: dict[str, Any]) -> str:
    """Return a line that names device and versions."""
    versions = environment["versions"]
    device = environment["device_kind"]
    if environment["platform"] == "cpu":
        device = describe_processors(environment)
    commit = f", commit {environment['commit'][:10]}" if environment["commit"] else ""
    return f"{device}; jax {versions['jax']}, specjax {versions['specjax']}{commit}"
