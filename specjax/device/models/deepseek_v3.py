"""Decoders with latent attention and experts: `deepseek_v3` and `glm4_moe_lite` (GLM-4.7-Flash).

Layers of latent attention, of which the first have a dense feed-forward layer and the others a
mixture with a sigmoid router and shared experts (DeepSeek-V3, section 2.1).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.spec import projection, stored
from specjax.device.cache.latent import LatentAttention
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.linear import linear
from specjax.device.models.layers.mla import MLA, mla, mla_specs
from specjax.device.models.layers.mlp import MLP, mlp_specs
from specjax.device.models.layers.moe import Experts, MoE, feed_forward, moe_specs
from specjax.device.models.layers.residual import Residual
from specjax.device.models.layers.rope import Rope, yarn_magnitude
from specjax.device.models.layers.router import SigmoidRouter
from specjax.device.models.layers.rows import Rows
from specjax.device.models.model import Features


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeepSeekLayer:
    """Weights of one decoder layer."""

    attention_norm: jax.Array  # [D]
    attention: MLA
    mlp_norm: jax.Array  # [D]
    mlp: MLP | MoE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeepSeekParams:
    """Weights of a decoder; `lm_head` is None if it is tied to the embedding."""

    embedding: jax.Array  # [V, D]
    layers: tuple[DeepSeekLayer, ...]
    norm: jax.Array  # [D]
    lm_head: jax.Array | None  # [D, V]


@dataclass(frozen=True, kw_only=True)
class DeepSeek:
    """A decoder with latent attention. Hashable, so that it can be a static argument."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: LatentAttention  # its cache
    q_rank: int | None
    rms_norm_eps: float
    rope: Rope
    max_position: int
    experts: Experts
    dense_layers: tuple[int, ...]  # layers without experts
    tie_word_embeddings: bool = False
    num_mtp_layers: int = 0  # modules for multi-token prediction (MTP)

    @property
    def has_centred_norms(self) -> bool:
        """False: norm weights are stored unchanged."""
        return False

    @property
    def cache_kinds(self) -> tuple[LatentAttention]:
        """Latents only."""
        return (self.attention,)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """All layers have the same kind."""
        return (0,) * self.num_layers

    def with_layers(self, num_layers: int) -> "DeepSeek":
        """See `Model.with_layers`."""
        attention = replace(self.attention, num_layers=num_layers)
        return replace(self, num_layers=num_layers, attention=attention)

    @property
    def head_shape(self) -> None:
        """None: the sizes do not say what an EAGLE head's attention is."""

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """The MTP modules, which follow the layers."""
        end = self.num_layers + max(1, self.num_mtp_layers)
        return tuple(f"model.layers.{i}." for i in range(self.num_layers, end))

    def specs(self, names: Collection[str] = ()) -> DeepSeekParams:
        """See `Model.specs`."""
        dim = self.hidden_size
        return DeepSeekParams(
            embedding=stored(
                ["model.embed_tokens.weight"], (self.vocab_size, dim), axes=("vocab", None)
            ),
            layers=tuple(
                layer_specs(self, f"model.layers.{i}", names, i not in self.dense_layers)
                for i in range(self.num_layers)
            ),
            norm=stored(["model.norm.weight"], (dim,)),
            lm_head=None
            if self.tie_word_embeddings
            else projection(["lm_head.weight"], dim, [self.vocab_size], axes=(None, "vocab")),
        )

    def extend(
        self,
        params: DeepSeekParams,
        tokens: jax.Array,
        rows: Rows,
        caches: tuple[Any, ...] | None,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[Features, tuple[Any, ...]]:
        """See `Model.extend`."""
        (pool,) = caches or (None,)
        x = self.embed(params, tokens)
        stream = Residual(x, jnp.zeros_like(x))
        angles = self.rope.angles(rows.positions)
        entering = []
        for i, layer in enumerate(params.layers):
            entering.append(stream)
            stream, pool = decoder_layer(layer, stream, rows, angles, pool, jnp.int32(i), self)
        entering.append(stream)
        _, hidden = stream.normed(params.norm, self, rows.kernels)
        return Features.of(hidden, [entering[i].sum() for i in aux_layers]), (pool,)

    def embed(self, params: DeepSeekParams, tokens: jax.Array) -> jax.Array:
        """Return the input embeddings [N, D] of tokens i32[N]."""
        return params.embedding[tokens]

    def logits(self, params: DeepSeekParams, hidden: jax.Array) -> jax.Array:
        """Return the next-token logits f32[N, V] of hidden states [N, D]."""
        head = params.embedding.T if params.lm_head is None else params.lm_head
        return linear(hidden, head, jnp.float32)


# Traced once for dense and once for sparse layers, because the layer index is an operand.
@partial(jax.jit, static_argnames="model")
def decoder_layer(
    params: DeepSeekLayer,
    stream: Residual,
    rows: Rows,
    angles: tuple[jax.Array, jax.Array],
    pool: Any,
    layer: jax.Array,
    model: DeepSeek,
) -> tuple[Residual, Any]:
    """Run one pre-norm decoder layer."""
    x, normed = stream.normed(params.attention_norm, model, rows.kernels)
    mixed, pool = mla(params.attention, normed, rows, angles, pool, layer, model.attention)
    x, normed = Residual(x, mixed).normed(params.mlp_norm, model, rows.kernels)
    return Residual(x, feed_forward(params.mlp, normed, model.experts, rows)), pool


def layer_specs(
    model: DeepSeek, prefix: str, names: Collection[str], is_sparse: bool
) -> DeepSeekLayer:
    """Return one decoder layer as a tree of `TensorSpec`; `names` are those in the checkpoint."""
    dim = model.hidden_size
    return DeepSeekLayer(
        attention_norm=stored([f"{prefix}.input_layernorm.weight"], (dim,)),
        attention=mla_specs(model.attention, f"{prefix}.self_attn", dim, model.q_rank),
        mlp_norm=stored([f"{prefix}.post_attention_layernorm.weight"], (dim,)),
        mlp=moe_specs(model.experts, dim, f"{prefix}.mlp", names, "shared_experts")
        if is_sparse
        else mlp_specs(f"{prefix}.mlp", dim, model.intermediate_size),
    )


def from_hf(hf: HFConfig) -> DeepSeek:
    """Return the model of a Hugging Face config of type `deepseek_v3` or `glm4_moe_lite`."""
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
        max_position=hf.integer("max_position_embeddings", 4096),
        experts=_experts(hf),
        dense_layers=_dense_layers(hf, num_layers),
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        num_mtp_layers=_num_mtp_layers(hf),
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


def _experts(hf: HFConfig) -> Experts:
    is_deepseek = hf.get("model_type", "deepseek_v3") == "deepseek_v3"
    inner = hf.integer("moe_intermediate_size")
    router = SigmoidRouter(
        normalises=hf.flag("norm_topk_prob", True),
        scaling=hf.number("routed_scaling_factor", 2.5 if is_deepseek else 1.8),
        num_groups=hf.integer("n_group", 8 if is_deepseek else 1),
        num_chosen_groups=hf.integer("topk_group", 4 if is_deepseek else 1),
    )
    experts = Experts(
        num_experts=hf.integer("n_routed_experts"),
        num_chosen=hf.integer("num_experts_per_tok"),
        intermediate_size=inner,
        shared_intermediate_size=inner * hf.integer("n_shared_experts", 1),
        router=router,
    )
    per_group, rest = divmod(experts.num_experts, router.num_groups)
    if rest or router.num_groups > 1 and per_group < 2:
        raise CheckpointError(
            f"{hf.origin}: n_group={router.num_groups} must divide n_routed_experts="
            f"{experts.num_experts} into groups of two or more"
        )
    if router.num_chosen_groups > router.num_groups:
        raise CheckpointError(
            f"{hf.origin}: topk_group={router.num_chosen_groups} exceeds "
            f"n_group={router.num_groups}"
        )
    if experts.num_chosen > per_group * router.num_chosen_groups:
        raise CheckpointError(
            f"{hf.origin}: num_experts_per_tok={experts.num_chosen} exceeds the "
            f"{per_group * router.num_chosen_groups} experts of topk_group groups"
        )
    return experts


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
        # transformers does not read it, so that it must agree.
        if dense == tuple(range(len(dense))):
            hf.require("first_k_dense_replace", len(dense))
        return dense
    return tuple(range(min(num_layers, _count(hf, "first_k_dense_replace", 3))))


def _num_mtp_layers(hf: HFConfig) -> int:
    name = "num_mtp_layers" if "num_mtp_layers" in hf.fields else "num_nextn_predict_layers"
    return _count(hf, name, 1)


def _count(hf: HFConfig, key: str, default: int) -> int:
    return 0 if hf.get(key, default) == 0 else hf.integer(key, default)
