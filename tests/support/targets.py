"""Tiny targets in transformers' layout, and their MTP modules in the published layout."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.weights import HeadFiles, TargetFiles, randomise, rewrite

from specjax.device.models.text_config import FAMILIES, WRAPPERS

VOCAB = 96
CONFIG_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

HYBRID_SIZES = {
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.25,
    },
}
MOE_SIZES = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GPT_OSS_SIZES = {
    "intermediate_size": 64,
    "head_dim": 8,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 10,
    "swiglu_limit": 0.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
SIGMOID_SIZES = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 1,
    "topk_group": 1,
}
LATENT_SIZES = {
    **SIGMOID_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
LATENT_KINDS = ("deepseek_v3", "glm4_moe_lite")
SIGMOID_KINDS = (*LATENT_KINDS, "glm4_moe")
# The smallest sizes of the vision and audio parts of multimodal models.
_WIDTH = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
VISION_SIZES = {**_WIDTH, "depth": 1, "num_heads": 2, "num_position_embeddings": 16}
_ENCODER = {**_WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
_OTHER_PARTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {"embed_dim": 16, "depth": 1, "num_heads": 2, "hidden_size": 32},
    "qwen2_5_vl": {**VISION_SIZES, "fullatt_block_indexes": [0], "window_size": 8},
    "qwen3_vl": {**VISION_SIZES, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {**VISION_SIZES, "deepstack_visual_indexes": [0]},
    "glm4v_moe": {**VISION_SIZES, "image_size": 8},
    "mistral3": {**_ENCODER, "model_type": "pixtral", "head_dim": 8},
    "llava": {**_ENCODER, "model_type": "clip_vision_model"},
    "internvl": {**_ENCODER, "image_size": [8, 8], "patch_size": [4, 4]},
    "idefics3": _ENCODER,
    "smolvlm": _ENCODER,
    "gemma3": {**_ENCODER, "model_type": "siglip_vision_model", "image_size": 64},
    "voxtral": {**_ENCODER, "num_mel_bins": 8, "max_source_positions": 8},
}
_MROPE = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [1, 1, 2]}
# Further sizes of text models, by model type.
_TEXTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl_text": {"rope_parameters": _MROPE},
    "qwen2_5_vl_text": {"rope_parameters": _MROPE},
    "qwen3_vl_text": {"rope_parameters": _MROPE, "head_dim": 8},
    "qwen3_vl_moe_text": {"rope_parameters": _MROPE, "head_dim": 8},
    "glm4v_moe_text": {
        "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    },
    # Windows are shorter than a chunk, and caps change many scores and logits.
    "gemma2": {
        **{"head_dim": 10, "query_pre_attn_scalar": 5, "sliding_window": 10},
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    },
    "gemma3_text": {
        **{"head_dim": 8, "query_pre_attn_scalar": 20, "sliding_window": 10},
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e3, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}


def _hf_config(kind: str, given: Mapping[str, Any]) -> Any:
    import transformers

    whole = WRAPPERS.get(kind)
    text = given.get("model_type", kind if whole is None else whole.text)
    config = _text_sizes(text) | given
    if whole is None:
        return transformers.AutoConfig.for_model(kind, **config)
    width = {} if kind == "qwen2_vl" else {"out_hidden_size": config["hidden_size"]}
    other = _OTHER_PARTS.get(kind, VISION_SIZES)
    named = "audio_config" if kind == "voxtral" else "vision_config"
    return transformers.AutoConfig.for_model(
        kind,
        text_config=config | {"model_type": text},
        tie_word_embeddings=config["tie_word_embeddings"],
        **{named: {**other, **(width if other.get("depth") else {})}},
    )


def _text_sizes(kind: str) -> dict[str, Any]:
    sizes = {
        **CONFIG_SIZES,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        **_TEXTS.get(kind, {}),
    }
    family = FAMILIES.get(kind, kind)
    if _is_hybrid(kind):
        sizes |= HYBRID_SIZES
    if family in LATENT_KINDS:
        sizes |= LATENT_SIZES
    elif family == "glm4_moe":
        sizes |= SIGMOID_SIZES
    elif "moe" in kind or kind == "qwen3_next":
        sizes |= MOE_SIZES
        if family != "qwen3_moe":
            sizes["shared_expert_intermediate_size"] = 20
    if kind == "gpt_oss":
        sizes |= GPT_OSS_SIZES
    if family in ("deepseek_v3", "glm4_moe"):
        sizes |= {"first_k_dense_replace": 1}
    return sizes


def _is_hybrid(kind: str) -> bool:
    return kind == "qwen3_next" or kind.startswith("qwen3_5")


def _auto_class(kind: str) -> Any:
    import transformers

    if kind == "voxtral":
        return transformers.AutoModelForMultimodalLM
    is_whole = kind in WRAPPERS
    return getattr(transformers, f"AutoModelFor{'ImageTextToText' if is_whole else 'CausalLM'}")


def write_target(
    folder: Path, kind: str, seed: int, max_shard_size: str, config: Mapping[str, Any]
) -> TargetFiles:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    hf_config = _hf_config(kind, config)
    hf_config._attn_implementation = "eager"
    model = _auto_class(kind).from_config(hf_config, dtype=torch.float32).eval()
    # Weights of plain norms are near 1: in hybrids only the recurrent output norm, in Gemma none.
    plain_norms = "linear_attn.norm" if _is_hybrid(kind) else "norm"
    plain_norms = "none" if kind.startswith("gemma") else plain_norms
    buffers = {n: x for n, x in model.named_buffers() if n.endswith("e_score_correction_bias")}
    randomise(dict(model.named_parameters()) | buffers, seed, plain_norms)
    model.generation_config.eos_token_id = hf_config.get_text_config().eos_token_id
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return TargetFiles(folder, model)


def write_fused(folder: Path, target: TargetFiles) -> TargetFiles:
    """Write a copy of `target` with the tensors of transformers' modules, which fuse experts."""
    shutil.copytree(target.folder, folder)
    rewrite(folder / "model.safetensors", lambda _: target.hf.state_dict())
    return TargetFiles(folder, target.hf)


def write_mtp(
    folder: Path, target: TargetFiles, layout: str, is_beside: bool, count: int
) -> HeadFiles:
    import safetensors.torch
    import torch

    assert layout in ("fused", "single")
    hf, dim = target.hf.config.get_text_config(), target.hf.config.get_text_config().hidden_size
    layers, numbered = target.hf.get_decoder().layers, hf.model_type in SIGMOID_KINDS
    if numbered:
        prefixes = [f"model.layers.{len(layers) + i}." for i in range(count)]
        layer, fc, norms, attention = "", "eh_proj", ("enorm", "hnorm", "shared_head.norm"), -1
    else:
        prefixes, layer, fc = ["mtp."], "layers.0.", "fc"
        norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        attention = max(i for i, kind in enumerate(hf.layer_types) if kind == "full_attention")
    held, tensors = layers[attention].state_dict(), {}
    for prefix in prefixes:
        tensors |= {f"{prefix}{layer}{n}": torch.empty_like(x) for n, x in held.items()}
        tensors[f"{prefix}{fc}.weight"] = torch.empty(dim, 2 * dim)
        for norm in norms:
            tensors[f"{prefix}{norm}.weight"] = torch.empty(dim)
    randomise(tensors, 1, plain_norms="norm" if numbered else "none")

    shutil.copytree(target.folder, folder)
    written = _unfused(tensors) if layout == "single" else tensors
    if is_beside:
        safetensors.torch.save_file(written, folder / "mtp.safetensors")
    else:
        rewrite(folder / "model.safetensors", lambda old: old | written)
    config = json.loads((folder / "config.json").read_text())
    field = "num_nextn_predict_layers" if numbered else "mtp_num_hidden_layers"
    config.get("text_config", config)[field] = count
    (folder / "config.json").write_text(json.dumps(config))
    return HeadFiles(folder, tensors, config.get("text_config", config))


def _unfused(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors, with separate tensors for each expert."""
    single = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".experts.")
        names = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(last)
        if not prefix or names is None:
            single[name] = tensor
            continue
        for i, one in enumerate(tensor):
            for of, part in zip(names, one.chunk(len(names)), strict=True):
                single[f"{prefix}.experts.{i}.{of}_proj.weight"] = part.clone()
    return single
