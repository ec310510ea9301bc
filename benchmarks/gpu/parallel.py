"""Measures steps of models that are divided over the GPUs of one machine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from engines import Chosen, Models, describe, free, make_engine, measure_engine, random_params
from seed import RATES
from timing import Setting, attempt

from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import Params
from specjax.device.parallel import specs_of
from specjax.device.placement import Placement

KS = (0, 3)


def measure_parallel(
    setting: Setting, name: str, counts: Sequence[int], batches: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of a model on each number of devices, for each batch size and K.

    A machine with fewer devices gives one line that says so.
    """
    for count in setting.pick(counts, counts[:1]):
        row = {"what": "step", "model": name, "num_devices": count}
        if count > jax.local_device_count():
            yield row | {"absent": f"there are {jax.local_device_count()} devices"}
            continue
        placement = Placement.on(*jax.local_devices()[:count])
        models = divided_models(name, placement, setting)
        for batch in setting.pick(batches, (2,)):
            policy = Chosen(KS, k=max(KS))
            engine = make_engine(models, batch, policy, RATES, setting, placement=placement)
            for k in KS:
                yield attempt(
                    row | {"batch": batch, "k": k},
                    lambda k=k, engine=engine, policy=policy: measure_engine(
                        engine, policy, k, setting
                    ),
                )
            free(engine)


def divided_models(name: str, placement: Placement, setting: Setting) -> Models:
    """Make a model and its drafter with random weights, divided over the devices."""
    target, head = describe(name, setting)
    target = replace(target, num_devices=placement.num_devices)
    head = replace(head, shape=replace(head.shape, num_devices=placement.num_devices))
    dtype = setting.pick("bfloat16", "float32")
    weights = [
        random_params(specs_of(one), dtype, seed, placement)
        for seed, one in enumerate((target, head))
    ]
    return Models(target, ChainDrafter(head), Params(*weights), Params(weights[0], None))
