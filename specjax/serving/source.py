"""What a model and its drafter are, by their files, or by their configs alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.hub import resolve
from specjax.config import OWN_SHAPE, SpeculativeConfig
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import Drafter
from specjax.device.drafters.eagle import EagleHead
from specjax.device.drafters.mtp import MTPHead
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.llama import Llama
from specjax.device.models.model import Model
from specjax.device.models.qwen3_5 import Qwen35
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
    if config.model == OWN_SHAPE:
        if not isinstance(target, Llama):
            raise CheckpointError(
                f"{source.hf.origin}: method 'eagle' without a --drafter stands for a layer of the "
                "target's own shape, which is known of llama, qwen2 and qwen3; name a --drafter, "
                "or use --method mtp"
            )
        head = EagleHead(shape=replace(target, num_layers=1))
        return ChainDrafter(head), _shapes(head.specs(), dtype)
    if config.method == "ngram":
        return load_drafter(None, config, target, np.dtype(dtype))
    if config.model is not None:
        return load_drafter(resolve(config.model), config, target, np.dtype(dtype))
    if source.folder is not None and source.has_weights:
        return load_drafter(source.folder, config, target, np.dtype(dtype))
    if not isinstance(target, Qwen35) or target.num_mtp_layers > 1:
        raise CheckpointError(
            f"{source.hf.origin}: method 'mtp' needs a model with a module of its own, of one "
            "layer (qwen3_next, qwen3_5, qwen3_5_moe); name a --drafter and its --method instead"
        )
    head = MTPHead(target)
    return ChainDrafter(head), _shapes(head.specs(), dtype)


def _shapes(specs: Any, dtype: str) -> Any:
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype or dtype), specs)
