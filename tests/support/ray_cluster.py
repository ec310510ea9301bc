"""A Ray cluster on this machine, whose workers compile programs as the tests do."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.compilations import compile_in_child

ROOT = Path(__file__).parents[2]


@contextmanager
def ray_cluster(num_devices: int = 1) -> Iterator[Any]:
    """Start Ray with two CPUs, and yield the module. Each worker has `num_devices` devices."""
    found = pytest.importorskip("ray")
    environment = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
    }
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of Ray's own start
        patch.setenv("RAY_worker_niceness", "0")  # else they wait for all else that runs
        found.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={
                "env_vars": environment,
                "worker_process_setup_hook": f"{__name__}.compile_as_here",
            },
        )
    yield found
    found.shutdown()


def compile_as_here() -> None:
    """Compile in a worker as in the tests' own process. Ray calls this when a worker starts."""
    compile_in_child(ROOT)
