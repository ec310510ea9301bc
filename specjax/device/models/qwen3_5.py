"""Hybrid decoders of the Qwen3-Next family: `qwen3_next`, `qwen3_5_text`, `qwen3_5_moe_text`.

All three types have one architecture. By default, three Gated DeltaNet layers precede each gated
attention layer, which has a partial rotary embedding. Feed-forward layers are dense or mixtures of
experts. A norm's weight is stored as its scale minus one. The types differ in the names and the
interleaving of their tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pallas_kernels.gated_delta_rule import Heads
from specjax.checkpoint.division import Share, grouped
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.spec import TensorSpec, cut_rows, depthwise, stored
from specjax.device.cache.kind import CacheKind
from specjax.device.cache.paged import PagedAttention
from specjax.device.cache.recurrent import DeltaRule
from specjax.device.models.decoder import Decoder
from specjax.device.models.experts import read_dense_layers, read_experts
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.attention import Attention
from specjax.device.models.layers.gated_delta_net import GatedDeltaNet
from specjax.device.models.llama import Llama, head_shape
from specjax.device.weights.matrix import dense

KINDS = ATTENTION, DELTA = "full_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class Qwen35(Decoder):
    """A decoder with attention layers and recurrent layers."""

    layer_types: tuple[str, ...]  # "full_attention" or "linear_attention" for each layer
    num_heads: int
    num_kv_heads: int
    head_dim: int
    delta_heads: Heads
    conv_width: int
    # Whether recurrent projections have the names and the order of Qwen3-Next.
    is_interleaved: bool = False
    num_mtp_layers: int = 0  # modules for multi-token prediction (MTP)

    @property
    def has_centred_norms(self) -> bool:
        """True: a norm's weight is stored as its scale minus one."""
        return True

    @property
    def num_layers(self) -> int:
        """The number of attention layers and recurrent layers together."""
        return len(self.layer_types)

    @property
    def attention(self) -> PagedAttention:
        """The cache kind of the attention layers."""
        return PagedAttention(
            num_layers=self.layer_types.count(ATTENTION),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            has_centred_norms=self.has_centred_norms,
        )

    @property
    def delta_rule(self) -> DeltaRule:
        """The cache kind of the recurrent layers."""
        return DeltaRule(
            num_layers=self.layer_types.count(DELTA),
            heads=self.delta_heads,
            conv_width=self.conv_width,
            rms_norm_eps=self.rms_norm_eps,
        )

    @property
    def own_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kinds of attention layers and of recurrent layers, in the order of `KINDS`."""
        return self.attention, self.delta_rule

    @property
    def own_layer_kinds(self) -> tuple[int, ...]:
        """Each layer's index into `own_kinds`. The field `layer_types` determines the index."""
        return tuple(map(KINDS.index, self.layer_types))

    @property
    def shares(self) -> dict[str, Share]:
        """See `Model.shares`."""
        heads, keys = grouped(self.num_heads, self.num_kv_heads, self.num_devices)
        shares = {**super().shares, "heads": heads, "kv_heads": keys}
        delta = self.delta_heads
        values, keys = grouped(
            delta.num_values,
            delta.num_keys,
            self.num_devices,
            may_copy=not self.is_interleaved,  # in the file, a key head is next to its value heads
        )
        return {**shares, "value_heads": values, "key_heads": keys}

    def local_heads(self, shares: Mapping[str, Share]) -> dict[str, Any]:
        """See `Decoder.local_heads`."""
        keys, values = shares["key_heads"].size, shares["value_heads"].size
        return {
            "num_heads": shares["heads"].size,
            "num_kv_heads": shares["kv_heads"].size,
            "delta_heads": self.delta_heads._replace(num_keys=keys, num_values=values),
        }

    def with_layers(self, num_layers: int) -> "Qwen35":
        """See `Model.with_layers`."""
        return replace(self, layer_types=self.layer_types[:num_layers])

    @property
    def head_shape(self) -> Llama:
        """A one-layer decoder with the attention layers' heads; see `Model.head_shape`."""
        return head_shape(self, self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """The name prefix of the MTP module's tensors."""
        return ("mtp.",)

    def attention_specs(self, prefix: str, kind: int) -> Attention | GatedDeltaNet:
        """See `Decoder.attention_specs`."""
        if KINDS[kind] == ATTENTION:
            return _attention_specs(self, f"{prefix}.self_attn")
        return _delta_specs(self, f"{prefix}.linear_attn")


def _attention_specs(model: Qwen35, prefix: str) -> Attention:
    head, dim = model.head_dim, model.hidden_size
    q, kv = model.num_heads * head, model.num_kv_heads * head
    inputs = [f"{prefix}.{name}_proj.weight" for name in "qkv"]
    return Attention(
        # In q_proj, each head has first its query rows, then its gate rows.
        qkv=dense(
            inputs,
            dim,
            [2 * q, kv, kv],
            parts={"q": q, "gate": q, "k": kv, "v": kv},
            interleaved={inputs[0]: (head, head)},
            columns=(("heads", 2 * q), ("kv_heads", kv), ("kv_heads", kv)),
        ),
        out=dense([f"{prefix}.o_proj.weight"], q, [dim], rows="heads"),
        q_norm=stored([f"{prefix}.q_norm.weight"], (head,), fill=0.0),
        k_norm=stored([f"{prefix}.k_norm.weight"], (head,), fill=0.0),
    )


def _delta_specs(model: Qwen35, prefix: str) -> GatedDeltaNet:
    heads, dim = model.delta_heads, model.hidden_size
    inner, num_values = heads.num_values * heads.value_dim, heads.num_values
    keys = heads.num_keys * heads.key_dim
    channels = ("key_heads", keys), ("key_heads", keys), ("value_heads", inner)
    if model.is_interleaved:
        group = num_values // heads.num_keys  # value heads per key head
        qkvz, ba = f"{prefix}.in_proj_qkvz.weight", f"{prefix}.in_proj_ba.weight"
        wide = group * heads.value_dim
        in_proj = dense(
            [qkvz, ba],
            dim,
            [heads.channels + inner, 2 * num_values],
            interleaved={qkvz: (heads.key_dim, heads.key_dim, wide, wide), ba: (group, group)},
            columns="key_heads",
        )
    else:
        names = [f"{prefix}.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")]
        in_proj = dense(
            names,
            dim,
            [heads.channels, inner, num_values, num_values],
            columns=(*channels, *(("value_heads", n) for n in (inner, num_values, num_values))),
        )

    def exact(name: str) -> Any:
        shapes = ((num_values,),)
        cuts = cut_rows(shapes, "value_heads")
        return TensorSpec((f"{prefix}.{name}",), shapes, dtype="float32", cuts=cuts)

    return GatedDeltaNet(
        in_proj=in_proj,
        conv=depthwise(f"{prefix}.conv1d.weight", heads.channels, model.conv_width, channels),
        log_decay=exact("A_log"),
        decay_bias=exact("dt_bias"),
        norm=stored([f"{prefix}.norm.weight"], (heads.value_dim,)),
        out=dense([f"{prefix}.out_proj.weight"], inner, [dim], rows="value_heads"),
    )


def from_hf(hf: HFConfig) -> Qwen35:
    """Return the model that a Hugging Face config of the Qwen3-Next family describes."""
    kind = hf.get("model_type", "qwen3_5_text")
    hf.require("hidden_act", "silu")
    hf.require("attn_output_gate", True)
    hf.require("mamba_ssm_dtype", "float32")
    hf.require("mtp_use_dedicated_embeddings", False)
    hf.require_unset("attention_bias", "use_sliding_window")
    if hf.get("output_gate_type", "silu") not in ("silu", "swish"):
        hf.require("output_gate_type", "swish")
    num_layers = hf.integer("num_hidden_layers")
    head_dim = hf.integer("head_dim", 256)
    heads, experts = hf.integer("num_attention_heads"), read_experts(hf, kind)
    return Qwen35(
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        intermediate_size=hf.integer("intermediate_size", experts.active_size if experts else None),
        layer_types=_layer_types(hf, num_layers),
        num_heads=heads,
        num_kv_heads=hf.kv_heads(heads, default=None),
        head_dim=head_dim,
        delta_heads=_delta_heads(hf),
        conv_width=hf.integer("linear_conv_kernel_dim", 4),
        rms_norm_eps=hf.number("rms_norm_eps", 1e-6),
        rope=hf.rope(head_dim, partial_factor=0.25),
        max_position=hf.max_position(32768),
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        experts=experts,
        dense_layers=read_dense_layers(hf, num_layers) if experts else (),
        is_interleaved=kind == "qwen3_next",
        num_mtp_layers=hf.count("mtp_num_hidden_layers", 0),
    )


def _layer_types(hf: HFConfig, num_layers: int) -> tuple[str, ...]:
    interval = hf.integer("full_attention_interval", 4)
    regular = tuple(DELTA if (i + 1) % interval else ATTENTION for i in range(num_layers))
    given = hf.get("layer_types", regular)
    types = tuple(given) if isinstance(given, Sequence) else ()
    if len(types) != num_layers or any(kind not in (ATTENTION, DELTA) for kind in types):
        raise CheckpointError(
            f"{hf.origin}: layer_types must name {ATTENTION!r} or {DELTA!r} for each of "
            f"num_hidden_layers={num_layers}; got {given!r}"
        )
    if hf.get("full_attention_interval", None) is not None and types != regular:
        raise CheckpointError(
            f"{hf.origin}: layer_types={list(types)} disagrees with "
            f"full_attention_interval={interval}; correct one, or remove the interval"
        )
    return types


def _delta_heads(hf: HFConfig) -> Heads:
    heads = Heads(
        num_keys=hf.integer("linear_num_key_heads", 16),
        num_values=hf.integer("linear_num_value_heads", 32),
        key_dim=hf.integer("linear_key_head_dim", 128),
        value_dim=hf.integer("linear_value_head_dim", 128),
    )
    if heads.num_values % heads.num_keys:
        raise CheckpointError(
            f"{hf.origin}: linear_num_value_heads={heads.num_values} must be a multiple of "
            f"linear_num_key_heads={heads.num_keys}"
        )
    return heads


def to_hf(model: Qwen35) -> Mapping[str, Any]:
    """Return a `config.json` of type `qwen3_5_text` for a model that this package trained."""
    heads = model.delta_heads
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "layer_types": list(model.layer_types),
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "linear_num_key_heads": heads.num_keys,
        "linear_num_value_heads": heads.num_values,
        "linear_key_head_dim": heads.key_dim,
        "linear_value_head_dim": heads.value_dim,
        "linear_conv_kernel_dim": model.conv_width,
        "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": model.rope.theta,
            "partial_rotary_factor": model.rope.head_dim / model.head_dim,
        },
        "max_position_embeddings": model.max_position,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": False,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": model.num_mtp_layers,
    }
