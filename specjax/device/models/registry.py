"""Registry of models by the `model_type` of their config."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoint.block_scaled import with_scales
from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles, open_checkpoint
from specjax.checkpoint.hub import resolve
from specjax.checkpoint.save import copy_tokenizer, plain_config, save_checkpoint
from specjax.checks import did_you_mean
from specjax.device.loading import load_params
from specjax.device.models import deepseek_v3, glm4_moe, gpt_oss, llama, qwen3_5
from specjax.device.models.config_fields import check_fields, weight_blocks
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Model
from specjax.device.placement import Placement

MODELS: dict[str, Callable[[HFConfig], Model]] = {
    "llama": llama.from_hf,
    "mistral": llama.from_hf,
    "ministral": llama.from_hf,
    "ministral3": llama.from_hf,
    "qwen2": llama.from_hf,
    "qwen3": llama.from_hf,
    "qwen3_moe": llama.from_hf,
    "phi3": llama.from_hf,
    "gpt_oss": gpt_oss.from_hf,
    "qwen3_next": qwen3_5.from_hf,
    "qwen3_5": qwen3_5.from_hf,
    "qwen3_5_text": qwen3_5.from_hf,
    "qwen3_5_moe": qwen3_5.from_hf,
    "qwen3_5_moe_text": qwen3_5.from_hf,
    "deepseek_v3": deepseek_v3.from_hf,
    "glm4_moe": glm4_moe.from_hf,
    "glm4_moe_lite": deepseek_v3.from_hf,
}


def read_config(folder: Path) -> HFConfig:
    """Read the config of a checkpoint folder."""
    return HFConfig(read_json(folder, "config.json"), str(folder / "config.json"))


def describe_model(hf: HFConfig) -> Model:
    """Return the model that a config describes, without its weights."""
    kind = hf.get("model_type", None)
    if not isinstance(kind, str) or kind not in MODELS:
        raise CheckpointError(
            f"{hf.origin}: model_type={kind!r} is not supported; supported: {', '.join(MODELS)}"
            f"{did_you_mean(kind, MODELS)}"
        )
    check_fields(hf, kind)
    return MODELS[kind](hf)


def load_model(
    folder: Path, dtype: np.dtype, placement: Placement | None = None
) -> tuple[Model, Any]:
    """Load the model in a checkpoint folder and its parameters in `dtype`, see `load_params`."""
    hf = read_config(folder)
    model, files = describe_model(hf), open_weights(folder, hf, dtype)
    specs = model.specs(files.names())
    ignore = partial(is_unused, model)
    return model, load_params(files, specs, dtype, placement=placement, ignore=ignore)


def save_model(folder: str | Path, model: Model, params: Any, source: str | Path) -> None:
    """Write parameters of a model as a checkpoint that this package and transformers load.

    Weights are stored in the parameters' dtypes, those that `source` has packed or in float8 in
    full; a vision tower and MTP modules are left out.

    Args:
        source: the checkpoint that the model was read from (a folder, hub id or demo name), whose
            config and tokenizer are copied.

    Raises:
        ValueError: `params` are not the model's.
        CheckpointError: `source` cannot be read, or is of another model.
        OSError: no space or no permission; names the folder.
    """
    origin, folder = resolve(source), Path(folder)
    config = plain_config(read_json(origin, "config.json"))
    if describe_model(HFConfig(config, str(origin / "config.json"))) != model:
        raise CheckpointError(
            f"{origin} is the checkpoint of another model than the one to save; name its own"
        )
    dtype = np.dtype(params.embedding.dtype)
    save_checkpoint(folder, model.specs(), params, config | {"dtype": dtype.name}, dtype=dtype)
    copy_tokenizer(origin, folder)


def open_weights(folder: Path, hf: HFConfig, dtype: np.dtype) -> TensorFiles:
    """Open the weights of a checkpoint folder; those in float8 with scales are read in `dtype`."""
    files, block = open_checkpoint(folder), weight_blocks(hf)
    return files if block is None else with_scales(files, block, dtype)


def is_unused(model: Model, name: str) -> bool:
    """Return whether a checkpoint may have this tensor although no spec of the model names it."""
    # Old exports store rotary frequencies; with tied embeddings the head may be stored, too.
    is_derived = name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"
    return is_derived or name.startswith(model.ignored_prefixes)
