"""Reads the versions of packages, JAX's devices and the processor, for benchmark reports."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from specjax.device.instructions import cpu_instructions, cpuinfo


def describe_environment() -> dict[str, Any]:
    """Return versions, devices and the processor as plain types."""
    devices = jax.devices()
    return {
        "versions": describe_versions(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "cpu_model": cpu_model(),
        "cpu_instructions": cpu_instructions(),
        "num_cpus": num_cpus(),
        "system": platform.platform(),
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    packages = ("specjax", "jax", "jaxlib", "numpy")
    return {
        "python": platform.python_version(),
        **{name: package_version(name) for name in packages},
    }


def package_version(name: str) -> str:
    """Return the installed version of a package, or "unknown" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def cpu_model() -> str:
    """Return the processor's name, as reported by the system."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def describe_processors(environment: Mapping[str, Any]) -> str:
    """Describe in words the processors of an `environment` (see `describe_environment`)."""
    model, instructions = environment["cpu_model"], environment["cpu_instructions"]
    return f"{model}, {instructions}, {environment['num_cpus']} CPUs"


def num_cpus() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
