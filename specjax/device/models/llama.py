"""Decoders of the Llama family: `llama`, `mistral`, `ministral`, `ministral3`, `phi3`, `qwen2`,
`qwen3` and `qwen3_moe`.

All types have one architecture with optional tensors, windows and experts. Qwen2 has a bias on q, k
and v. Llama can have a bias on every attention projection. Qwen3 normalises q and k per head. A
tensor that a model does not have is None, and is skipped. In all types except `llama`, layers can
attend within a window. Qwen3-MoE has experts. Phi-3 stores q, k and v in one tensor, and gate and
up in another. Ministral 3 scales queries by their position.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specjax.checkpoint.division import Share, grouped
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.spec import stored
from specjax.device.cache.paged import PagedAttention
from specjax.device.models.decoder import Decoder
from specjax.device.models.experts import read_dense_layers, read_experts
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.attention import Attention
from specjax.device.models.layers.mlp import MLP, mlp_specs
from specjax.device.models.layers.rope import Rope
from specjax.device.models.windows import read_windows
from specjax.device.weights.matrix import dense


@dataclass(frozen=True, kw_only=True)
class Llama(Decoder):
    """A decoder with grouped-query attention."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # per layer, in tokens; () if no layer has a window
    local_rope: Rope | None = None  # rotary embedding of layers with a window; None: `rope`
    query_scale: float = 1.0  # see `PagedAttention`
    score_cap: float | None = None  # see `PagedAttention`
    has_sinks: bool = False
    # Whether q, k and v are one tensor in checkpoints, and gate and up another.
    is_merged: bool = False

    @property
    def attention(self) -> PagedAttention:
        """The cache kind of all layers.

        Do not read this property if layers have different windows. Then there are several kinds.
        """
        (kind,) = self.own_kinds
        return kind

    @property
    def own_kinds(self) -> tuple[PagedAttention, ...]:
        """One attention kind for each window size, and one for layers without a window."""
        windows = self._layer_windows
        return tuple(self._attention(one, windows.count(one)) for one in dict.fromkeys(windows))

    @property
    def own_layer_kinds(self) -> tuple[int, ...]:
        """Each layer's index into `own_kinds`. The layer's window determines the index."""
        windows = self._layer_windows
        kinds = list(dict.fromkeys(windows))
        return tuple(kinds.index(one) for one in windows)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding of each cache kind. The kind's window determines the embedding."""
        local = self.local_rope or self.rope
        return tuple(self.rope if kind.window is None else local for kind in self.cache_kinds)

    @property
    def _layer_windows(self) -> tuple[int | None, ...]:
        return self.windows or (None,) * self.num_layers

    def _attention(self, window: int | None, num_layers: int) -> PagedAttention:
        return PagedAttention(
            num_layers=num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            has_centred_norms=self.has_centred_norms,
            window=window,
            query_scale=self.query_scale,
            soft_cap=self.score_cap,
        )

    @property
    def shares(self) -> dict[str, Share]:
        """See `Model.shares`."""
        heads, keys = grouped(self.num_heads, self.num_kv_heads, self.num_devices)
        return {**super().shares, "heads": heads, "kv_heads": keys}

    def local_heads(self, shares: Mapping[str, Share]) -> dict[str, Any]:
        """See `Decoder.local_heads`."""
        return {"num_heads": shares["heads"].size, "num_kv_heads": shares["kv_heads"].size}

    def with_layers(self, num_layers: int) -> "Llama":
        """See `Model.with_layers`."""
        return replace(self, num_layers=num_layers, windows=self.windows[:num_layers])

    @property
    def head_shape(self) -> "Llama":
        """A one-layer decoder with this model's attention heads; see `Model.head_shape`."""
        return head_shape(self, self.num_heads, self.num_kv_heads, self.head_dim)

    def attention_specs(self, prefix: str, kind: int) -> Attention:
        """See `Decoder.attention_specs`."""
        return attention_specs(self, f"{prefix}.self_attn", self.hidden_size)

    def dense_specs(self, prefix: str) -> MLP:
        """See `Decoder.dense_specs`."""
        sizes = self.hidden_size, self.intermediate_size
        return mlp_specs(prefix, *sizes, self.activation, self.is_merged)


def head_shape(target: Decoder, num_heads: int, num_kv_heads: int, head_dim: int) -> Llama:
    """Return a decoder of one dense layer, with these heads and otherwise the target's sizes.

    The rotary embedding of this decoder is not scaled.
    """
    return Llama(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=Rope(head_dim=head_dim, theta=target.rope.theta),
        max_position=target.max_position,
        num_devices=target.num_devices,
    )


def attention_specs(model: Llama, prefix: str, num_in: int) -> Attention:
    """Return attention weights as `TensorSpec`s; `num_in` is the projections' input width."""
    q, kv, head = (
        model.num_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
        model.head_dim,
    )
    inputs, sizes = [f"{prefix}.{name}_proj" for name in "qkv"], [q, kv, kv]
    parts = dict(zip("qkv", sizes, strict=True))
    sections = ("heads", q), ("kv_heads", kv), ("kv_heads", kv)
    if model.is_merged:
        inputs, sizes = [f"{prefix}.qkv_proj"], [q + 2 * kv]
    return Attention(
        qkv=dense(
            [f"{name}.weight" for name in inputs],
            num_in,
            sizes,
            parts=parts,
            columns=sections,
        ),
        out=dense([f"{prefix}.o_proj.weight"], q, [model.hidden_size], rows="heads"),
        qkv_bias=stored([f"{name}.bias" for name in inputs], *((n,) for n in sizes), rows=sections)
        if model.qkv_bias
        else None,
        out_bias=stored([f"{prefix}.o_proj.bias"], (model.hidden_size,))
        if model.out_bias
        else None,
        q_norm=model.norm_spec(f"{prefix}.q_norm", head) if model.qk_norm else None,
        k_norm=model.norm_spec(f"{prefix}.k_norm", head) if model.qk_norm else None,
        sinks=stored([f"{prefix}.sinks"], (model.num_heads,), rows="heads")
        if model.has_sinks
        else None,
    )


def from_hf(hf: HFConfig) -> Llama:
    """Return the model that a Hugging Face config of the Llama family describes."""
    hf.require_unset("mlp_bias")
    hf.require("hidden_act", "silu")
    kind = hf.get("model_type", "llama")
    bias = hf.flag("attention_bias")
    hidden, heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    head_dim, num_layers = hf.integer("head_dim", hidden // heads), hf.integer("num_hidden_layers")
    experts, rope = read_experts(hf, kind), hf.rope(head_dim, 1.0 if kind == "phi3" else None)
    if kind == "ministral3":
        rope = replace(rope, query_beta=_query_beta(hf))
    return Llama(
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=hf.kv_heads(heads, default=heads),
        head_dim=head_dim,
        rms_norm_eps=hf.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position=hf.max_position(2048),
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        qkv_bias=kind == "qwen2" or bias,
        out_bias=kind != "qwen2" and bias,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        windows=read_windows(hf, kind, num_layers),
        experts=experts,
        dense_layers=read_dense_layers(hf, num_layers) if experts else (),
        is_merged=kind == "phi3",
    )


def _query_beta(hf: HFConfig) -> float:
    fields = hf.rope_fields()
    if "llama_4_scaling_beta" not in fields or "original_max_position_embeddings" not in fields:
        raise CheckpointError(
            f"{hf.origin}: rope_parameters must have llama_4_scaling_beta and "
            f"original_max_position_embeddings for this model_type; got {dict(fields)}"
        )
    return HFConfig(fields, f"{hf.origin}: rope_parameters").number("llama_4_scaling_beta", 0.1)


def to_hf(model: Llama) -> Mapping[str, Any]:
    """Return a `config.json` of type `llama` for a model that this package trained."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "max_position_embeddings": model.max_position,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }
