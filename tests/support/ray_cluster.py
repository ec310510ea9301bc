"""A Ray cluster on this machine, whose workers compile programs as the tests do."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parents[2]


@contextmanager
def ray_cluster(num_devices: int = 1) -> Iterator[Any]:
    """Start Ray with two CPUs, and yield the module. Each worker has `num_devices` devices."""
    found = pytest.importorskip("ray")
    environment = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "ray"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        # As the tests' own programs are compiled.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(jax.config.values["jax_disable_most_optimizations"]),
    }
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of Ray's own start
        patch.setenv("RAY_worker_niceness", "0")  # else they wait for all else that runs
        found.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": environment},
        )
    yield found
    found.shutdown()
