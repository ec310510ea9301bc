"""Measures how busy the host keeps the device, and compares ways to launch steps.

    busy = ms of a step on the device / ms per step of the engine

The time on the device is measured by many launches of the same program in a row, without host work
between them. If `busy` is 1, the device never waits for the host.
"""

import os
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
from engines import Chosen, free, make_config, make_engine, make_models, measure_engine, step_floor
from seed import RATES
from steps import Step
from timing import Setting, attempt, spread, step_times

MODEL, KS = "Llama-3.1-8B", (0, 3)
CPU_KS = (1,)  # one value is enough to see that the programs run
EARLY_LAUNCH = {"xla_gpu_enable_pdl": True}  # exists since jax 0.11, and is off by default
WAYS = {
    "async": {},
    "sync": {"async_scheduling": False},
}


def measure_host(setting: Setting, batch: int) -> Iterator[dict[str, Any]]:
    """Yield step times on the device and in the engine, and their ratio `busy`."""
    models, ks = make_models(MODEL, setting), setting.pick(KS, CPU_KS)
    row = {"what": "host", "model": MODEL, "batch": batch}
    device_ms = {}
    for k in ks:

        def on_device(k=k):
            step = Step(models, make_config(batch, setting, 3), k, RATES[:3], setting, max_drafts=3)
            times = step_times(step.launch, setting)
            device_ms[k] = times["median"]
            return {"ms_per_step": times["median"], "ms": times}

        yield attempt(row | {"k": k, "way": "device"}, on_device)
    for way, options in WAYS.items():
        policy = Chosen(ks)
        engine = make_engine(models, batch, policy, RATES[:3], setting, **options)
        for k in ks:

            def one(k=k, engine=engine, policy=policy):
                found = measure_engine(engine, policy, k, setting)
                if k in device_ms:
                    found["busy"] = device_ms[k] / found["ms_per_step"]
                return found

            yield attempt(row | {"k": k, "way": way}, one)
        free(engine)


def measure_early_launch(setting: Setting, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Compare steps of one request with and without early launch of kernels.

    With early launch (programmatic dependent launch), a kernel starts before the previous kernel
    ends, and waits before it reads or writes. So all results must be equal. Both programs are
    compiled in one process, so that they are tuned in the same way.
    """
    for name in names:
        models, ks = make_models(name, setting), setting.pick(KS, CPU_KS)
        for k in ks:
            row = {"what": "early launch", "model": name, "batch": 1, "k": k}

            def one(models=models, k=k):
                config = make_config(1, setting, 3)
                usual, early = (
                    Step(models, config, k, RATES[:3], setting, max_drafts=3, options=options)
                    for options in ({}, EARLY_LAUNCH)
                )
                for _ in range(setting.pick(300, 3)):
                    is_same = np.array_equal(usual.launch(), early.launch())
                    if not is_same:
                        break
                found = {"is_same": is_same and usual.equals(early)}
                pairs = [
                    [step_times(step.launch, setting)["median"] for step in (usual, early)]
                    for _ in range(setting.pick(5, 1))
                ]
                ratios = spread([before / after for before, after in pairs])
                return found | {"ms_per_step": median(pair[1] for pair in pairs), "ratio": ratios}

            yield attempt(row, one)


def measure_step(setting: Setting, label: str) -> Iterator[dict[str, Any]]:
    """Measure a step of one request with the XLA flags of this process."""
    models, ks = make_models(MODEL, setting), setting.pick(KS, CPU_KS)
    for k in ks:
        row = {"what": "command buffers", "model": MODEL, "batch": 1, "k": k, "buffers": label}

        def one(k=k):
            step = Step(models, make_config(1, setting, 3), k, RATES[:3], setting, max_drafts=3)
            times = step_times(step.launch, setting)
            floor = step_floor(models, 1, k, setting)
            return {
                "ms_per_step": times["median"],
                "ms": times,
                "xla_flags": os.environ.get("XLA_FLAGS", ""),
                "gbps": floor / times["median"] / 1e6,
            }

        yield attempt(row, one)
