"""Versions and hardware, on which results depend besides the code."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax


def describe_environment() -> dict[str, Any]:
    """Return versions, devices and processor as plain types."""
    devices = jax.devices()
    return {
        "versions": describe_versions(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "cpu_model": cpu_model(),
        "num_cpus": num_cpus(),
        "system": platform.platform(),
    }


def describe_versions() -> dict[str, str]:
    """Return versions of Python and of the packages that results depend on."""
    packages = ("specjax", "jax", "jaxlib", "numpy")
    return {
        "python": platform.python_version(),
        **{name: package_version(name) for name in packages},
    }


def package_version(name: str) -> str:
    """Return the installed version, or "unknown" for a package that is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def cpu_model() -> str:
    """Return the processor's name, as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def num_cpus() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
