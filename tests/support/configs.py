"""Models described by Hugging Face configs with few fields."""

from typing import Any

from support.targets import CONFIG_SIZES, LATENT_KINDS, LATENT_SIZES

from specjax.device.models.hf_config import HFConfig
from specjax.device.models.registry import describe_model

NESTED = "qwen3_5", "qwen3_5_moe"  # their text model is a part of them


def described(kind: str = "llama", **fields: Any) -> Any:
    """Return the model that a small config of type `kind` describes.

    `fields` replace or add fields. For a multimodal type they belong to `text_config`.
    """
    sizes = {**CONFIG_SIZES, "head_dim": 16, **(LATENT_SIZES if kind in LATENT_KINDS else {})}
    config = {"text_config": sizes | fields} if kind in NESTED else sizes | fields
    return describe_model(HFConfig({"model_type": kind, **config}, "there/config.json"))
