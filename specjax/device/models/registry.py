"""Models by the `model_type` of their config."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.load import load_params
from specjax.device.models import llama
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Model

MODELS: dict[str, Callable[[HFConfig], Model]] = {
    "llama": llama.from_hf,
    "qwen2": llama.from_hf,
    "qwen3": llama.from_hf,
}


def read_config(folder: Path) -> HFConfig:
    """The config of a checkpoint folder."""
    return HFConfig(read_json(folder, "config.json"), str(folder / "config.json"))


def describe_model(hf: HFConfig) -> Model:
    """The model a config describes, without its weights."""
    kind = hf.get("model_type", None)
    if kind not in MODELS:
        raise CheckpointError(
            f"{hf.origin}: model_type={kind!r} is not supported; supported: {', '.join(MODELS)}"
        )
    return MODELS[kind](hf)


def load_model(folder: Path, dtype: np.dtype) -> tuple[Model, Any]:
    """The model in a checkpoint folder and its parameters in `dtype`, on the default device."""
    model = describe_model(read_config(folder))
    specs = model.specs()
    used = {name for spec in jax.tree.leaves(specs) for name in spec.names}

    def is_derived(name: str) -> bool:
        # Old exports store the rotary frequencies; tied ones may store the head a second time.
        return name.endswith("rotary_emb.inv_freq") or name in {"lm_head.weight"} - used

    return model, load_params(open_checkpoint(folder), specs, dtype, ignore=is_derived)
