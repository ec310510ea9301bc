"""Measures a program's time: from many launches in a row, and for each kernel by a profiler."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import jax
import numpy as np
from jax.stages import Wrapped

T = TypeVar("T")
REPEATS, REPEAT_SECONDS, MAX_LAUNCHES = 10, 0.015, 200
# The duration of a row of launches of whole steps, which take milliseconds. With one or two
# launches in a row, about 0.4 ms of overhead would be attributed to each step.
STEP_ROW_SECONDS = 0.2
CUPTI_RUNS = 10


@dataclass(frozen=True)
class Setting:
    """Tells where a case runs: on a card, or on a CPU in the smoke test."""

    is_cpu: bool

    def pick(self, real: T, tiny: T) -> T:
        """Return `real` on a card, and `tiny` in the smoke test on a CPU."""
        return tiny if self.is_cpu else real

    @property
    def kernels(self) -> str:
        """The name of the kernels' implementation that is measured."""
        return self.pick("triton", "interpret")


def spread(samples: list[float], unit: float = 1.0) -> dict[str, float]:
    """Return the median, tenth and ninetieth percentile, multiplied by `unit`, and the count."""
    p10, p50, p90 = (float(q) * unit for q in np.quantile(samples, (0.1, 0.5, 0.9)))
    return {"median": p50, "p10": p10, "p90": p90, "count": len(samples)}


def launch_times(
    launch: Callable[[], Any], setting: Setting, *, row_seconds: float = REPEAT_SECONDS
) -> list[float]:
    """Return the seconds per launch, for several rows of launches.

    A row is many launches. Only the last launch of a row is waited for.
    """

    def seconds(count: int) -> float:
        start, last = time.perf_counter(), None
        for _ in range(count):
            last = launch()
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / count

    seconds(1)  # compiles, and touches memory for the first time
    one = seconds(setting.pick(3, 1))
    count = setting.pick(min(max(int(row_seconds / one), 1), MAX_LAUNCHES), 1)
    return [seconds(count) for _ in range(setting.pick(REPEATS, 2))]


def step_times(launch: Callable[[], Any], setting: Setting) -> dict[str, float]:
    """Return the milliseconds of a step.

    The step is launched many times in a row, so that the device never waits for the host.
    """
    return spread(launch_times(launch, setting, row_seconds=STEP_ROW_SECONDS), 1e3)


def kernel_times(launch: Callable[[], Any], setting: Setting) -> tuple[dict[str, float], str]:
    """Return the seconds of a launch by kernel name.

    Also return why the seconds are unknown; "" if they are known.
    """
    runs, why_not = kernel_runs(launch, setting)
    by_name: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        total: dict[str, float] = defaultdict(float)
        for name, seconds in run:
            total[name] += seconds
        for name, seconds in total.items():
            by_name[name].append(seconds)
    return {name: median(seconds) for name, seconds in by_name.items()}, why_not


def kernel_runs(
    launch: Callable[[], Any], setting: Setting
) -> tuple[list[list[tuple[str, float]]], str]:
    """Return, for several launches, the kernels' names and seconds in order.

    Also return why there are no launches; "" if there are some.
    """
    if setting.is_cpu:
        return [], "no GPU"
    try:
        from jax.experimental.mosaic.gpu import profiler

        launched = _Launched(launch)
        _, runs = profiler.measure(launched, aggregate=False, iterations=CUPTI_RUNS)()
    except Exception as error:  # record any error of jax's profiler
        return [], repr(error)[:300]
    return [[(name, ms / 1e3) for name, ms in run] for run in runs or []], ""


class _Launched(Wrapped):
    """Wraps a launch, because the profiler would jit a plain function."""

    def __init__(self, launch: Callable[[], Any]):
        self._launch = launch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._launch()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def measure(
    launch: Callable[[], Any], setting: Setting, *, calls: int, num_bytes: float
) -> dict[str, Any]:
    """Return the microseconds per call, and the GB/s if a call moves `num_bytes`.

    A launch has `calls` calls.
    """
    walls = launch_times(launch, setting)
    kernels, why_not = kernel_times(launch, setting)
    wall = spread(walls, 1e6 / calls)
    row: dict[str, Any] = {"wall_us": wall, "device_us": None}
    best = wall["median"]
    if kernels:
        best = row["device_us"] = sum(kernels.values()) * 1e6 / calls
        row["kernels_us"] = {name: s * 1e6 / calls for name, s in kernels.items()}
    else:
        row["no_device_time"] = why_not
    return row | {
        "timed_by": "device" if kernels else "wall",
        "bytes": num_bytes,
        "gbps": num_bytes / best / 1e3,
    }


def attempt(row: dict[str, Any], function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the row with the results of `function`, or with the error that it raises."""
    try:
        return row | function()
    except Exception as error:  # any error costs only one figure of many
        return row | {"error": f"{type(error).__name__}: {error}"[:600]}
