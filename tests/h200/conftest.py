"""Compilation for an H200 in a process of its own, so that this one's JAX stays on the CPU."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLUGINS = "xla_cuda13", "xla_cuda12"


def has_cuda_plugin() -> bool:
    """Whether jax's CUDA plugin is installed; it need not find a GPU."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.{plugin}") for plugin in PLUGINS)


@pytest.fixture(scope="session")
def compile_for_h200() -> Callable[..., list[dict[str, Any]]]:
    """(file, requests) -> reports, both as compile.py has them; skips without the plugin."""
    return _runner("compile.py", timeout=600)


@pytest.fixture(scope="session")
def resources_for_h200() -> Callable[..., list[dict[str, Any]]]:
    """The same by resources.py, which needs ptxas on the path."""
    if shutil.which("ptxas") is None:
        pytest.skip("needs ptxas")
    return _runner("resources.py", timeout=1800)


def _runner(tool: str, timeout: int) -> Callable[..., list[dict[str, Any]]]:
    if not has_cuda_plugin():
        pytest.skip("needs jax's CUDA plugin (jax-cuda13-plugin, jax-cuda13-pjrt)")

    def run(file: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(tool)), file, json.dumps(requests)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    return run
