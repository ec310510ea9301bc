"""What a model and its drafter are, by their files, or by their configs alone."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.hub import resolve
from specjax.config import OWN_SHAPE, WEIGHTLESS_METHODS, SpeculativeConfig
from specjax.device.drafters.drafter import Drafter
from specjax.device.drafters.registry import OWN_SHAPES, load_drafter, shape_drafter
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Model
from specjax.device.models.registry import read_config

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")


class ModelSource(NamedTuple):
    """Where a model is described, and where the rest of it lies."""

    hf: HFConfig
    folder: Path | None  # None for a config that is a file by itself
    has_weights: bool


def open_source(model: str | Path) -> ModelSource:
    """The checkpoint, or the config without one, that `model` stands for."""
    path = Path(model).expanduser()
    if path.suffix == ".json" and not path.is_dir():
        return ModelSource(HFConfig(read_json(path.parent, path.name), str(path)), None, False)
    folder = resolve(model)
    has_weights = any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
    return ModelSource(read_config(folder), folder, has_weights)


def open_drafter(
    config: SpeculativeConfig, target: Model, source: ModelSource, dtype: str
) -> tuple[Drafter, Any]:
    """The drafter and its parameters, after checking that it fits the target.

    Of a target's own module, the parameters are shapes where the target has no weights; so are
    those of a head of the target's own shape.
    """
    is_module = config.model is None and config.method in OWN_SHAPES
    if config.model == OWN_SHAPE or (is_module and not source.has_weights):
        return shape_drafter(config.method, target, source.hf.origin, dtype)
    return load_drafter(drafter_folder(config, source.folder), config, target, np.dtype(dtype))


def drafter_folder(speculation: SpeculativeConfig, target_folder: Path | None) -> Path | None:
    """Where the drafter's checkpoint lies: the target's own where none is named; None for ngram.

    Raises:
        ValueError: a Model value has no folder to take it from.
        CheckpointError: there is no such checkpoint.
    """
    if speculation.model is not None:
        return resolve(speculation.model)
    if speculation.method in WEIGHTLESS_METHODS:
        return None
    if target_folder is None:
        raise ValueError(
            f"speculative_config.model=None with method={speculation.method!r} stands for the "
            "target's own checkpoint, but the target is a Model value; give the folder"
        )
    return target_folder
