"""Decides which fields of a Hugging Face config are read, ignored, warned about or refused.

The reference is the class in transformers for the config's model type. Most fields that this class
reads are also read here. Any other field that the class reads is an error if its value changes the
model. A field that the class ignores is of one of three kinds:

    harmless    it concerns tools, training, tokenizers or generation, and is ignored
    refused     it changes the mathematics of models of other types, and the config seems to
                describe one of those models; this is an error
    unknown     its effect on the model is unknown; a warning names it
"""

from collections.abc import Collection, Mapping, Set
from typing import Any

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.quantised.registry import described, read_format
from specjax.checks import warn
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.text_config import OTHER_PARTS, read_text

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("hidden_act", "tie_word_embeddings", "attention_bias"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
)
_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers")
_EXPERTS = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("decoder_sparse_step", "mlp_only_layers"),
)
_GEMMA = (
    *(*_SIZES, "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types"),
    "final_logit_softcapping",
)
_DENSE = {
    "llama": (*_SIZES, "mlp_bias"),
    "arcee": (*_SIZES, "mlp_bias"),
    # The last field is an older name, which transformers ignores.
    "gemma2": (*_GEMMA, "attn_logit_softcapping", "sliding_window_size"),
    "gemma3_text": (
        *(*_GEMMA, "sliding_window_pattern", "rope_local_base_freq"),
        "_sliding_window_pattern",  # `layer_types` was derived from it
    ),
    "mistral": (*_SIZES, "sliding_window"),
    "ministral": (*_SIZES, "sliding_window", "layer_types"),
    "ministral3": (*_SIZES, "sliding_window"),
    "phi3": (*_SIZES, "sliding_window", "original_max_position_embeddings"),
    "qwen2": (*_SIZES, *_WINDOWS, "layer_types"),
    "qwen3": (*_SIZES, *_WINDOWS, "layer_types"),
    "gpt_oss": (
        *(*_SIZES, "sliding_window", "layer_types", "num_local_experts", "num_experts_per_tok"),
        *("swiglu_limit", "swiglu_alpha", "quantization_config"),
        # Older names of other fields, which transformers ignores.
        *("experts_per_token", "initial_context_length"),
    ),
    "qwen3_moe": (*_SIZES, *_WINDOWS, *_EXPERTS, "num_local_experts"),
}
_HYBRID = (
    *(*_SIZES, "layer_types", "full_attention_interval", "use_sliding_window"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "attn_output_gate", "output_gate_type"),
    *("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    *(*_EXPERTS, "shared_expert_intermediate_size"),
)
_SIGMOID = (
    *(*_SIZES, "moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor"),
    *("first_k_dense_replace", "num_nextn_predict_layers", "num_mtp_layers"),
)
_LATENT = (
    *(*_SIGMOID, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "qk_head_dim", "rope_interleave"),
    *("topk_method", "scoring_func", "moe_layer_freq"),
)
_SIGMOIDS = {
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": (*_LATENT, "mlp_layer_types"),
    "glm4_moe": (*_SIGMOID, "use_qk_norm"),
}
_HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
READ: Mapping[str, frozenset[str]] = {
    kind: frozenset(fields)
    for kind, fields in (_DENSE | dict.fromkeys(_HYBRIDS, _HYBRID) | _SIGMOIDS).items()
}
# Supported `quant_method`s, by model type.
QUANTISED = {"gpt_oss": ("mxfp4",)}
# Fields for tools, training, tokenizers or generation.
HARMLESS = frozenset(
    (
        *("architectures", "auto_map", "model_type", "_name_or_path", "name_or_path"),
        *("transformers_version", "torch_dtype", "dtype", "use_cache", "cache_implementation"),
        *("initializer_range", "attention_dropout", "hidden_dropout", "resid_dropout"),
        *(
            "resid_pdrop",
            "embd_pdrop",
            "embd_dropout",
            "classifier_dropout",
            "hidden_dropout_prob",
            "pretraining_tp",
        ),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("return_dict_in_generate", "router_aux_loss_coef", "id2label", "label2id"),
        *("aux_loss_alpha", "seq_aux", "ep_size"),
        *("problem_type", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder"),
        *("add_cross_attention", "tie_encoder_decoder", "torchscript", "task_specific_params"),
        *("finetuning_task", "tokenizer_class", "prefix", "_attn_implementation"),
        *("_attn_implementation_autoset", "attn_implementation", "_flash_attn_2_enabled"),
        *("gradient_checkpointing", "use_flash_attn", "model_max_length", "max_length"),
        *("min_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p"),
        *("typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
        *("num_beams", "num_beam_groups", "diversity_penalty", "early_stopping"),
        *("begin_suppress_tokens", "suppress_tokens", "exponential_decay_length_penalty"),
        *("remove_invalid_values", "output_scores", "pruned_heads", "use_bfloat16"),
        *("tf_legacy_loss", "cross_attention_hidden_size"),
        *("unsloth_fixed", "unsloth_version", "unsloth_tied_mlp", "transformers.js_config"),
        *("bos_token", "eos_token", "pad_token", "is_llama_config"),
    )
)
# Fields of other models, and their effect.
CHANGES = {
    "attn_logit_softcapping": "a cap on attention scores",
    "final_logit_softcapping": "a cap on logits",
    "use_bidirectional_attention": "attention to later tokens",
    "query_pre_attn_scalar": "a different scale of attention",
    "attention_multiplier": "a different scale of attention",
    "embedding_multiplier": "scaled embeddings",
    "residual_multiplier": "scaled residuals",
    "logits_scaling": "scaled logits",
    "logit_scale": "scaled logits",
    "scale_emb": "scaled embeddings",
    "scale_depth": "scaled residuals",
    "rope_interleave": "rotation of neighbours",
    "rope_interleaved": "rotation of neighbours",
    "clip_qkv": "clipped projections",
    "qkv_bias": "biases of projections",
    "use_qk_norm": "norms of queries and keys",
    "qk_layernorm": "norms of queries and keys",
    "use_parallel_residual": "parallel attention and feed-forward layers",
    "parallel_attn": "parallel attention and feed-forward layers",
    "alibi": "biases by distance",
    "sliding_window": "attention within a window",
    "attention_chunk_size": "attention within chunks",
    "no_rope_layers": "layers without rotation",
    "no_rope_layer_interval": "layers without rotation",
    "layer_types": "layers of several kinds",
    "kv_lora_rank": "latent attention",
    "q_lora_rank": "latent attention",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "mlp_bias": "biases of the feed-forward layers",
    "vision_config": "a vision tower",
    "mm_vision_tower": "a vision tower",
}

QUANTISATION = "quantization_config", "compression_config"
_FACTORS = frozenset(
    (
        *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "scale_emb"),
        *("logits_scaling", "logit_scale"),
    )
)


def check_fields(hf: HFConfig, text: HFConfig) -> None:
    """Raise an error for unsupported fields that change the mathematics; warn about unknown fields.

    Args:
        hf: the whole config.
        text: the config of the text model, which can be a part of `hf`; see `read_text`.

    Raises:
        CheckpointError: a field, or the quantisation method, is not supported. The message names
            the field and its effect, or the method.
    """
    kind = text.get("model_type", None)
    refuse_quantised(text, QUANTISED.get(kind, ()))
    read = READ[kind] | HARMLESS | {*QUANTISATION}
    _check_part(text, kind, read)
    if text.origin != hf.origin:
        _check_part(hf, hf.get("model_type", None), read | OTHER_PARTS)


def _check_part(part: HFConfig, kind: Any, read: Set[str]) -> None:
    is_set = {name for name, value in part.fields.items() if not _is_neutral(name, value)}
    for name in sorted(is_set - read & CHANGES.keys()):
        raise CheckpointError(
            f"{part.origin}: {name}={part.fields[name]!r} ({CHANGES[name]}) is not supported "
            f"for model_type={kind!r}; use a checkpoint without {name}"
        )
    if unknown := sorted(is_set - read):
        warn(
            f"{part.origin}: {', '.join(unknown)} is unknown for model_type={kind!r} and is "
            "ignored; if it changes what the model computes, outputs are wrong"
        )


def refuse_quantised(hf: HFConfig, readable: Collection[str] = ()) -> None:
    """Raise an error if the config says that weights are quantised by an unsupported method.

    The methods that `read_format` reads are supported, and so are the methods in `readable`.

    Raises:
        CheckpointError: a method is not supported. The message names the method and a remedy.
    """
    name, given = quantisation(hf)
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if given and method not in readable and read_format(given) is None:
        raise CheckpointError(
            f"{hf.origin}: {name} says that the weights are quantised by "
            f"{method or given!r}, which is not supported in this form; supported: {described()}; "
            "else use the original checkpoint in bfloat16, float16 or float32, or dequantise it"
        )


def check_plain(hf: HFConfig, quantization: str) -> None:
    """Raise a ValueError if a config says that the weights are quantised already.

    The message says that `quantization` needs unquantised weights.
    """
    name, given = quantisation(hf)
    if given:
        raise ValueError(
            f"quantization={quantization!r} needs a plain checkpoint, but {hf.origin} has {name}: "
            "its weights are quantised already, and stay as they are; leave it out"
        )


def quantisation(hf: HFConfig) -> tuple[str, Any]:
    """Return the name and the value of the config's field about quantised weights.

    The value is None if the config has no such field.
    """
    text = read_text(hf)
    for name in QUANTISATION:
        if given := text.fields.get(name):
            return name, given
    return QUANTISATION[0], None


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether the field's value switches its feature off."""
    if name == "layer_types":
        return isinstance(value, list) and all(kind == "full_attention" for kind in value)
    return not value or (name in _FACTORS and value == 1)
