"""Measures the time of each kernel in a model's step."""

import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from engines import make_config, make_models
from seed import RATES
from steps import Step
from timing import Setting, attempt, kernel_runs, step_times

SHAPES = {1: (0, 3), 64: (3,)}  # values of K by batch size
ROOM = 16


def profile_steps(setting: Setting, name: str) -> Iterator[dict[str, Any]]:
    """Yield the microseconds of each kernel of a step in order, and of each kind of kernel."""
    models = make_models(name, setting)
    for batch, ks in setting.pick(SHAPES, {2: (1,)}).items():
        for k in ks:
            row = {"what": "profile", "model": name, "batch": batch, "k": k}

            def one(batch=batch, k=k):
                config = make_config(batch, setting, 3, room=ROOM)
                step = Step(models, config, k, RATES[:3], setting, max_drafts=3)
                runs, why_not = kernel_runs(step.launch, setting)
                return {"ms": step_times(step.launch, setting), "why_not": why_not} | _sum(runs)

            yield attempt(row, one)


def _sum(runs: list[list[tuple[str, float]]]) -> dict[str, Any]:
    """Return the median times of kernels over several runs of a step.

    Runs with another number of kernels than most runs are left out.
    """
    if not runs:
        return {}
    length = median(len(run) for run in runs)
    runs = [run for run in runs if len(run) == length]
    kernels = [
        (calls[0][0], round(median(seconds for _, seconds in calls) * 1e6, 2))
        for calls in zip(*runs, strict=True)
    ]
    kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for kernel, us in kernels:
        kind = kinds[re.sub(r"[_.]?\d+$", "", kernel)]
        kind[0] += 1
        kind[1] += us
    ordered = sorted(kinds.items(), key=lambda item: -item[1][1])
    return {
        "num_kernels": len(kernels),
        "device_us": sum(us for _, us in kernels),
        "kinds": {name: [count, round(us, 1)] for name, (count, us) in ordered[:40]},
        "kernels_us": kernels,
    }
