"""The Gemma 2 and Gemma 3 families (`gemma2`, `gemma3_text`; Gemma Team 2024, 2025).

A Gemma model is a Llama with a norm before and after each attention and feed-forward layer, GeGLU
and scaled input embeddings. A norm's weight is stored as its scale minus one. Every second layer of
Gemma 2, and five of six layers of Gemma 3, attend within a window. Gemma 2 bounds attention scores
and logits by soft caps. Gemma 3 normalises queries and keys instead, and has different rotary
frequencies in layers with a window.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specjax.checkpoint.errors import CheckpointError
from specjax.device.models.decoder import LayerNorms
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.mlp import GeGLU
from specjax.device.models.layers.rope import Rope
from specjax.device.models.llama import Llama
from specjax.device.models.windows import FULL, SLIDING, read_windows

_NORMS = LayerNorms(
    attention="input_layernorm",
    mlp="pre_feedforward_layernorm",
    attention_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
)


@dataclass(frozen=True, kw_only=True)
class Gemma(Llama):
    """A Llama with Gemma's norms."""

    norms: LayerNorms = _NORMS

    @property
    def has_centred_norms(self) -> bool:
        """True: a norm's weight is stored as its scale minus one."""
        return True


def from_hf(hf: HFConfig) -> Gemma:
    """Return the model that a Hugging Face config of the Gemma family describes."""
    hf.require("hidden_activation", "gelu_pytorch_tanh")
    kind = hf.get("model_type", "gemma3_text")
    is_third = kind == "gemma3_text"
    heads, head_dim = hf.integer("num_attention_heads", 8), hf.integer("head_dim", 256)
    hidden, num_layers = hf.integer("hidden_size"), hf.integer("num_hidden_layers")
    rope, local_rope = _ropes(hf, head_dim) if is_third else (hf.rope(head_dim), None)
    has_bias = hf.flag("attention_bias")
    return Gemma(
        vocab_size=hf.integer("vocab_size", 262208 if is_third else 256000),
        hidden_size=hidden,
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=hf.kv_heads(heads, default=4),
        head_dim=head_dim,
        rms_norm_eps=hf.number("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        # In Gemma 3, the field is the length after scaling.
        max_position=hf.integer("max_position_embeddings", 131072)
        if is_third
        else hf.max_position(8192),
        tie_word_embeddings=hf.flag("tie_word_embeddings", True),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=is_third,
        windows=read_windows(hf, kind, num_layers),
        activation=GeGLU(),
        embedding_scale=hidden**0.5,
        query_scale=(head_dim / hf.number("query_pre_attn_scalar", 256)) ** 0.5,
        score_cap=None if is_third else _cap(hf, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(hf, "final_logit_softcapping", None if is_third else 30.0),
    )


def _cap(hf: HFConfig, name: str, default: float | None) -> float | None:
    # Null, unlike a missing field, means that there is no cap.
    given = hf.fields.get(name, default)
    return None if given is None else hf.number(name, given)


def _ropes(hf: HFConfig, head_dim: int) -> tuple[Rope, Rope]:
    """Return two rotary embeddings: for layers with full attention, and for layers with a window.

    In older configs, `rope_scaling` applies only to layers with full attention.
    """
    given = hf.nested("rope_parameters")
    if given.keys() - {FULL, SLIDING}:
        raise CheckpointError(
            f"{hf.origin}: rope_parameters must have only the fields {FULL!r} and {SLIDING!r} for "
            f"this model_type, each an object; got {given!r}"
        )
    each = HFConfig(given, f"{hf.origin}: rope_parameters")

    def rope(kind: str, theta: float, more: Mapping[str, Any]) -> Rope:
        fields = {"rope_theta": theta, **each.nested(kind), **more}
        own = {**hf.fields, "rope_scaling": None, "rope_parameters": fields}
        return HFConfig(own, f"{each.origin}: {kind}").rope(head_dim)

    return (
        rope(FULL, hf.number("rope_theta", 1e6), hf.nested("rope_scaling")),
        rope(SLIDING, hf.number("rope_local_base_freq", 1e4), {}),
    )
