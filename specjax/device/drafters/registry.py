"""The functions that load or describe drafters, by the config's `method`.

`config.METHODS` lists the config fields that each method needs.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.drafters import (
    dflash_files,
    draft_model,
    eagle,
    eagle3,
    medusa,
    mtp_files,
    ngram,
    p_eagle,
)
from specjax.device.drafters.chain import ChainDrafter, chain_loader
from specjax.device.drafters.drafter import Drafter
from specjax.device.drafters.eagle import EagleHead
from specjax.device.loading import Log, no_log
from specjax.device.models.model import Model
from specjax.device.parallel import shapes_of, specs_of
from specjax.device.placement import Placement, default_device

Load = Callable[..., tuple[Drafter, Any]]  # (folder, config, target, dtype, placement, log)
DRAFTERS: dict[str, Load] = {
    "eagle": chain_loader(eagle.load),
    "eagle3": chain_loader(eagle3.load),
    "mtp": chain_loader(mtp_files.load, mtp_files.drafter),
    "medusa": medusa.load,
    "ngram": ngram.load,
    "suffix": ngram.load,
    "dflash": dflash_files.load,
    "p_eagle": p_eagle.load,
    "draft_model": draft_model.load,
}
# The methods that compare tokenizers, and therefore read the target's folder.
COMPARING = ("draft_model",)
# Functions that make a drafter whose head has the target's shape.
OWN_SHAPES: dict[str, Callable[[Model, str], Drafter]] = {
    "eagle": lambda target, origin: ChainDrafter(EagleHead(shape=target.head_shape)),
    "mtp": lambda target, origin: mtp_files.drafter(mtp_files.of_own_shape(target, origin)),
}
# Functions that make a drafter with the sizes in a separate config.
FROM_CONFIG: dict[str, Callable[[Path, SpeculativeConfig, Model], Drafter]] = {
    "eagle3": eagle3.from_config,
    "dflash": dflash_files.from_config,
    "p_eagle": p_eagle.from_config,
    "draft_model": draft_model.from_config,
    "medusa": medusa.from_config,
}


def load_drafter(
    folder: Path | None,
    config: SpeculativeConfig,
    target: Model,
    dtype: np.dtype,
    placement: Placement | None = None,
    target_folder: Path | None = None,
    log: Log = no_log,
) -> tuple[Drafter, Any]:
    """Load a drafter and its parameters, as `config` describes, and check them against the target.

    `folder` is the drafter's checkpoint; None for a method without a checkpoint. The parameters go
    to `placement`; None means `default_device`. `target_folder` is the target's checkpoint; None
    if there is none. `log` receives a line about tensors that are not loaded and config values
    that are not used.

    Raises:
        CheckpointError: the files are damaged, or the drafter was made for another target.
    """
    load = DRAFTERS[config.method]
    if config.method in COMPARING:
        load = partial(load, target_folder=target_folder)
    return load(folder, config, target, dtype, placement or Placement.on(default_device()), log)


def shape_drafter(method: str, target: Model, origin: str, dtype: str) -> tuple[Drafter, Any]:
    """Return a drafter whose head has the target's shape, and a tree of its parameters' shapes.

    Raises:
        CheckpointError: the method needs a checkpoint. `origin` names the target in the message.
    """
    if method not in OWN_SHAPES:
        raise CheckpointError(
            f"{origin}: method {method!r} needs a checkpoint of the drafter; name one"
        )
    drafter = OWN_SHAPES[method](target, origin)
    return drafter, _shapes(drafter, dtype)


def drafter_from_config(
    folder: Path, config: SpeculativeConfig, target: Model, dtype: str
) -> tuple[Drafter, Any]:
    """Return a drafter with the sizes in a folder's config, and a tree of its parameters' shapes.

    Raises:
        CheckpointError: the method needs weights, or the drafter was made for another target.
    """
    if config.method not in FROM_CONFIG:
        raise CheckpointError(f"{folder} has no weights, but method {config.method!r} needs them")
    drafter = FROM_CONFIG[config.method](folder, config, target)
    return drafter, _shapes(drafter, dtype)


def _shapes(drafter: Drafter, dtype: str) -> Any:
    assert drafter.weights is not None
    return shapes_of(specs_of(drafter.weights), dtype)
