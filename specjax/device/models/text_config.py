"""The config of a text model, which can be a part of another model's config.

Models that also read images or sound contain a text model of a supported family. Their config holds
the text model's fields in `text_config`, or next to the fields of the other parts. Multimodal
rotary embeddings give a token three positions (time, height and width). They need no code here,
because the three positions of a text token are equal.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from specjax.checkpoint.errors import CheckpointError
from specjax.device.models.hf_config import HFConfig


class Wrapper(NamedTuple):
    """A kind of model that contains a text model and other parts."""

    text: str  # type of the text model, if it is not in `text_config`
    is_tied: bool = False  # default of `tie_word_embeddings`
    # Whether `tie_word_embeddings` in `text_config` ties the output head even if the outer field
    # is false.
    counts_inner: bool = False
    defaults: Mapping[str, Any] = {}  # values of fields that `text_config` lacks


_VOXTRAL = {"max_position_embeddings": 131072, "rope_theta": 1e8, "head_dim": 128}
# The wrappers by the model type of the outer config.
WRAPPERS: Mapping[str, Wrapper] = {
    "qwen3_5": Wrapper("qwen3_5_text"),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text"),
    "qwen3_vl": Wrapper("qwen3_vl_text"),
    "qwen3_vl_moe": Wrapper("qwen3_vl_moe_text"),
    "qwen2_vl": Wrapper("qwen2_vl_text", counts_inner=True),
    "qwen2_5_vl": Wrapper("qwen2_5_vl_text", counts_inner=True),
    "mistral3": Wrapper("mistral", is_tied=True),
    "glm4v_moe": Wrapper("glm4v_moe_text", counts_inner=True),
    "llava": Wrapper("llama", counts_inner=True),
    "internvl": Wrapper("qwen2", is_tied=True),
    "idefics3": Wrapper("llama"),
    "smolvlm": Wrapper("llama"),
    "gemma3": Wrapper("gemma3_text", is_tied=True),
    "voxtral": Wrapper("llama", defaults={**_VOXTRAL, "rms_norm_eps": 1e-5}),
}
# Maps the types of text models to the model types of their families.
FAMILIES: Mapping[str, str] = {
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "glm4v_moe_text": "glm4_moe",
}
_QWEN2_VL = {
    **{"max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "max_window_layers": 80,
}
_QWEN3_VL = {"max_position_embeddings": 128000, "rope_theta": 5e5}
# Defaults of transformers' class for a type, where they differ from the family's.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"max_position_embeddings": 131072},
    "ministral": {"max_position_embeddings": 131072},
    "ministral3": {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5},
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
    "qwen3_moe": {"max_position_embeddings": 32768},
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "arcee": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "deepseek_v3": {"q_lora_rank": 1536},
    "glm4_moe_lite": {
        **{"max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 768},
        **{"qk_nope_head_dim": 192, "v_head_dim": 256},
    },
    "qwen3_vl_text": {**_QWEN3_VL, "head_dim": 128},
    "qwen3_vl_moe_text": {**_QWEN3_VL, "num_experts": 60},
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "glm4v_moe_text": {"max_position_embeddings": 65536, "attention_bias": True},
}
# Values of fields that hold for a type even if its config has other values.
_FIXED: Mapping[str, Mapping[str, Any]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
# Fields of the other parts and of their connection.
OTHER_PARTS = frozenset(
    (
        *("text_config", "vision_config", "audio_config", "language_model_only"),
        *("image_token_id", "image_token_index", "image_start_token_id", "image_end_token_id"),
        *("video_token_id", "video_start_token_id", "video_end_token_id", "audio_token_id"),
        *("vision_start_token_id", "vision_end_token_id", "vision_token_id"),
        *("vision_feature_layer", "vision_feature_select_strategy", "image_seq_length"),
        *("projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size"),
        *("downsample_ratio", "scale_factor", "_pad_token_id"),
        *("mm_tokens_per_image", "boi_token_index", "eoi_token_index"),
    )
)
_SHARED = (
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("quantization_config", "compression_config"),
)
_MROPE = "mrope_section", "mrope_interleaved"


def read_text(hf: HFConfig) -> HFConfig:
    """Return the config of the text model.

    In the result, `model_type` names the model's family. The result includes the fields that all
    parts share. If a field is missing, and its default for the model's type differs from the
    family's default, the result has the type's default.

    Raises:
        CheckpointError: `text_config` is not an object.
    """
    kind = hf.get("model_type", None)
    wrapper = WRAPPERS.get(kind) if isinstance(kind, str) else None
    text, origin = dict(hf.fields), hf.origin
    if wrapper is not None:
        text = {name: value for name, value in text.items() if name not in OTHER_PARTS}
        nested = hf.get("text_config", None)
        if nested is None:
            text["model_type"] = wrapper.text
        else:
            text, origin = _nested(hf, wrapper, nested), f"{hf.origin}: text_config"
        kind = text["model_type"]
    if not isinstance(kind, str):
        return hf
    text = {**_DEFAULTS.get(kind, {}), **text, **_FIXED.get(kind, {})}
    if kind in FAMILIES:
        text["model_type"] = FAMILIES[kind]
    for name in "rope_scaling", "rope_parameters":
        if kind in FAMILIES and isinstance(text.get(name), Mapping):
            text[name] = _plain_rope(text[name])
    return HFConfig(text, origin)


def _nested(hf: HFConfig, wrapper: Wrapper, nested: Any) -> dict[str, Any]:
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"{hf.origin}: text_config must be an object, got {nested!r}")
    inner = HFConfig(nested, f"{hf.origin}: text_config")
    is_tied = inner.flag("tie_word_embeddings", wrapper.is_tied)
    if not (wrapper.counts_inner and is_tied):
        is_tied = hf.flag("tie_word_embeddings", is_tied)
    shared = {name: hf.fields[name] for name in _SHARED if hf.fields.get(name) is not None}
    kind = inner.get("model_type", wrapper.text)
    fields = {**wrapper.defaults, **nested, **shared}
    return {**fields, "model_type": kind, "tie_word_embeddings": is_tied}


def _plain_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rotary embedding's fields without the fields for positions in images.

    The type "mrope" (multimodal) becomes "default".
    """
    plain = {name: value for name, value in fields.items() if name not in _MROPE}
    for name in "rope_type", "type":
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return plain
