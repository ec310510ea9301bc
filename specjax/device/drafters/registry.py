"""Drafters by the `method` that asks for them: the only place that switches on the name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.drafters import eagle, eagle3, mtp, ngram
from specjax.device.drafters.chain import ChainDrafter, Head
from specjax.device.drafters.checkpoint import chain_loader
from specjax.device.drafters.drafter import Drafter
from specjax.device.models.model import Model
from specjax.device.placement import Placement

Load = Callable[
    [Path | None, SpeculativeConfig, Model, np.dtype, Placement | None], tuple[Drafter, Any]
]
DRAFTERS: dict[str, Load] = {
    "eagle": chain_loader(eagle.load),
    "eagle3": chain_loader(eagle3.load),
    "mtp": chain_loader(mtp.load),
    "ngram": ngram.load,
}
# Heads that a target's config alone tells the shape of.
OWN_SHAPES: dict[str, Callable[[Model, str], Head]] = {
    "eagle": eagle.of_own_shape,
    "mtp": mtp.of_own_shape,
}


def load_drafter(
    folder: Path | None,
    config: SpeculativeConfig,
    target: Model,
    dtype: np.dtype,
    placement: Placement | None = None,
) -> tuple[Drafter, Any]:
    """The drafter that a config names and its parameters, checked against the target.

    `folder` is its checkpoint; None for a method without one.

    Raises:
        CheckpointError: the files are damaged, or made for another target.
    """
    return DRAFTERS[config.method](folder, config, target, dtype, placement)


def shape_drafter(method: str, target: Model, origin: str, dtype: str) -> tuple[Drafter, Any]:
    """The drafter that a target's own shape makes, and the shapes of its parameters.

    Raises:
        CheckpointError: nothing is known of such; `origin` is what errors call the target.
    """
    if method not in OWN_SHAPES:
        raise CheckpointError(
            f"{origin}: method {method!r} needs a checkpoint of the drafter; name one"
        )
    head = OWN_SHAPES[method](target, origin)
    shapes = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype or dtype), head.specs()
    )
    return ChainDrafter(head), shapes
