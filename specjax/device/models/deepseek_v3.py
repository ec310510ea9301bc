"""Decoders with latent attention and experts: `deepseek_v3` and `glm4_moe_lite` (GLM-4.7-Flash).

All layers have latent attention. The first layers have a dense feed-forward layer. The other layers
have a mixture of experts with a sigmoid router and shared experts (DeepSeek-V3, section 2.1).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from specjax.checkpoint.division import Share, even
from specjax.checkpoint.errors import CheckpointError
from specjax.device.cache.latent import LatentAttention
from specjax.device.models.decoder import Decoder
from specjax.device.models.experts import read_first_dense, read_sigmoid_experts
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.mla import MLA, mla_specs
from specjax.device.models.layers.rope import yarn_magnitude
from specjax.device.models.llama import Llama, head_shape


@dataclass(frozen=True, kw_only=True)
class DeepSeek(Decoder):
    """A decoder with latent attention."""

    num_layers: int
    attention: LatentAttention  # the cache kind of all layers
    q_rank: int | None  # rank of the queries; None if they are not low-rank
    num_mtp_layers: int = 0  # modules for multi-token prediction (MTP)

    @property
    def own_kinds(self) -> tuple[LatentAttention]:
        """The only kind: latent attention."""
        return (self.attention,)

    @property
    def own_layer_kinds(self) -> tuple[int, ...]:
        """0 for every layer, because there is only one kind."""
        return (0,) * self.num_layers

    @property
    def shares(self) -> dict[str, Share]:
        """See `Model.shares`."""
        return {**super().shares, "heads": even(self.attention.num_heads, self.num_devices)}

    def local_heads(self, shares: Mapping[str, Share]) -> dict[str, Any]:
        """See `Decoder.local_heads`."""
        return {"attention": replace(self.attention, num_heads=shares["heads"].size)}

    def with_layers(self, num_layers: int) -> "DeepSeek":
        """See `Model.with_layers`."""
        attention = replace(self.attention, num_layers=num_layers)
        return replace(self, num_layers=num_layers, attention=attention)

    @property
    def head_shape(self) -> Llama:
        """See `Model.head_shape`.

        A new EAGLE head has grouped-query attention, so it does not use the sizes of latent
        attention. Its heads are 128 wide, and it has eight key heads. If these numbers do not
        divide the hidden size and the number of heads, smaller powers of two are used.
        """
        head_dim = gcd(self.hidden_size, 128)
        num_heads = self.hidden_size // head_dim
        return head_shape(self, num_heads, gcd(num_heads, 8), head_dim)

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """The name prefixes of the MTP modules, which are numbered after the layers."""
        return module_prefixes(self.num_layers, self.num_mtp_layers)

    def attention_specs(self, prefix: str, kind: int) -> MLA:
        """See `Decoder.attention_specs`."""
        return mla_specs(self.attention, f"{prefix}.self_attn", self.hidden_size, self.q_rank)


def from_hf(hf: HFConfig) -> DeepSeek:
    """Return the model that a config of type `deepseek_v3` or `glm4_moe_lite` describes."""
    hf.require_unset("attention_bias")
    hf.require("hidden_act", "silu")
    hf.require("scoring_func", "sigmoid")
    hf.require("topk_method", "noaux_tc")
    hf.require("moe_layer_freq", 1)
    heads, num_layers = hf.integer("num_attention_heads"), hf.integer("num_hidden_layers")
    hf.require("num_key_value_heads", heads)
    has_q_rank = hf.fields.get("q_lora_rank") is not None
    rope_dim = hf.integer("qk_rope_head_dim", 64)
    return DeepSeek(
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=num_layers,
        attention=_attention(hf, num_layers, heads, rope_dim),
        q_rank=hf.integer("q_lora_rank") if has_q_rank else None,
        rms_norm_eps=hf.number("rms_norm_eps", 1e-6),
        rope=hf.rope(rope_dim),
        max_position=hf.max_position(4096),
        experts=read_sigmoid_experts(hf),
        dense_layers=_dense_layers(hf, num_layers),
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        num_mtp_layers=read_num_modules(hf),
    )


def _attention(hf: HFConfig, num_layers: int, heads: int, rope_dim: int) -> LatentAttention:
    nope_dim = hf.integer("qk_nope_head_dim", 128)
    scale, fields = (nope_dim + rope_dim) ** -0.5, hf.rope_fields()
    if fields["rope_type"] != "default" and fields.get("mscale_all_dim"):
        scale *= yarn_magnitude(fields["factor"], fields["mscale_all_dim"]) ** 2
    return LatentAttention(
        num_layers=num_layers,
        num_heads=heads,
        rank=hf.integer("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=hf.integer("v_head_dim", 128),
        scale=scale,
        is_interleaved=hf.flag("rope_interleave", True),
    )


def _dense_layers(hf: HFConfig, num_layers: int) -> tuple[int, ...]:
    if hf.get("model_type", None) == "glm4_moe_lite":
        types = hf.get("mlp_layer_types", ["dense"] + ["sparse"] * (num_layers - 1))
        if (
            not isinstance(types, list)
            or len(types) != num_layers
            or any(kind not in ("dense", "sparse") for kind in types)
        ):
            raise CheckpointError(
                f"{hf.origin}: mlp_layer_types must name 'dense' or 'sparse' for each of "
                f"num_hidden_layers={num_layers}; got {types!r}"
            )
        dense = tuple(i for i, kind in enumerate(types) if kind == "dense")
        # transformers ignores this field, so it must agree.
        if dense == tuple(range(len(dense))):
            hf.require("first_k_dense_replace", len(dense))
        return dense
    return read_first_dense(hf, num_layers, default=3)


def read_num_modules(hf: HFConfig) -> int:
    """Return the number of MTP modules in a config of the DeepSeek-V3 or GLM-4 families."""
    name = "num_mtp_layers" if "num_mtp_layers" in hf.fields else "num_nextn_predict_layers"
    return hf.count(name, 1)


def module_prefixes(num_layers: int, num_modules: int) -> tuple[str, ...]:
    """Return the name prefixes of the MTP modules.

    Module i has the prefix that a layer `num_layers` + i would have. There is at least one prefix,
    even if `num_modules` is 0.
    """
    end = num_layers + max(1, num_modules)
    return tuple(f"model.layers.{i}." for i in range(num_layers, end))


def to_hf(model: DeepSeek) -> Mapping[str, Any]:
    """Return a `config.json` of type `glm4_moe_lite` for a model that this package trained."""
    kind, experts = model.attention, model.experts
    assert experts is not None, "the model has no experts"
    router: Any = experts.router
    dense = len(model.dense_layers)
    return {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": kind.num_heads,
        "num_key_value_heads": kind.num_heads,
        "q_lora_rank": model.q_rank,
        "kv_lora_rank": kind.rank,
        "qk_nope_head_dim": kind.nope_dim,
        "qk_rope_head_dim": kind.rope_dim,
        "v_head_dim": kind.value_dim,
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.intermediate_size,
        "n_shared_experts": experts.shared_intermediate_size // experts.intermediate_size,
        "routed_scaling_factor": router.scaling,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (model.num_layers - dense),
        "first_k_dense_replace": dense,
        "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "max_position_embeddings": model.max_position,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": False,
        "num_nextn_predict_layers": model.num_mtp_layers,
    }
