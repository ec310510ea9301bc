"""Decoders of the Llama family: `llama`, `mistral`, `ministral`, `ministral3`, `phi3`, `qwen2`,
`qwen3` and `qwen3_moe`.

One architecture; they differ only in optional tensors, windows and experts: Qwen2 has a bias on q,
k and v, Qwen3 normalises q and k per head, Llama may have a bias on every attention projection. A
tensor that a model does not have is None, and the forward pass skips it. In all but Llama, some
layers or all may attend within a window only. Qwen3-MoE has experts. Phi-3 stores q, k and v in one
tensor, gate and up in another. Ministral 3 scales queries by their position.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.spec import projection, stored
from specjax.device.cache.paged import PagedAttention
from specjax.device.models.experts import read_dense_layers, read_experts
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.attention import Attention, attention
from specjax.device.models.layers.linear import linear
from specjax.device.models.layers.mlp import MLP, mlp_specs
from specjax.device.models.layers.moe import Experts, MoE, feed_forward, moe_specs
from specjax.device.models.layers.residual import Residual
from specjax.device.models.layers.rope import Rope
from specjax.device.models.layers.rows import Rows
from specjax.device.models.model import Features
from specjax.device.models.windows import read_windows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LlamaLayer:
    """Weights of one decoder layer."""

    attention_norm: jax.Array  # [D]
    attention: Attention
    mlp_norm: jax.Array  # [D]
    mlp: MLP | MoE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LlamaParams:
    """Weights of a decoder; `lm_head` is None if it is tied to the embedding."""

    embedding: jax.Array  # [V, D]
    layers: tuple[LlamaLayer, ...]
    norm: jax.Array  # [D]
    lm_head: jax.Array | None  # [D, V]


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A decoder. Hashable, so that it can be a static argument of a compiled step."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # of each layer, in tokens; () if no layer has one
    experts: Experts | None = None
    dense_layers: tuple[int, ...] = ()  # layers without experts, if `experts` is given
    has_sinks: bool = False
    is_merged: bool = False  # checkpoints have q, k and v in one tensor, gate and up in another

    @property
    def has_centred_norms(self) -> bool:
        """False: norm weights are stored unchanged."""
        return False

    @property
    def attention(self) -> PagedAttention:
        """The cache of a model whose layers have the same window, or none."""
        (kind,) = self.cache_kinds
        return kind

    @property
    def cache_kinds(self) -> tuple[PagedAttention, ...]:
        """Attention; layers of the same window share a kind."""
        windows = self._layer_windows
        return tuple(self._attention(one, windows.count(one)) for one in dict.fromkeys(windows))

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """See `Model.layer_kinds`; by the layers' windows."""
        windows = self._layer_windows
        kinds = list(dict.fromkeys(windows))
        return tuple(kinds.index(one) for one in windows)

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
            window=window,
        )

    def with_layers(self, num_layers: int) -> "Llama":
        """See `Model.with_layers`."""
        return replace(self, num_layers=num_layers, windows=self.windows[:num_layers])

    @property
    def head_shape(self) -> "Llama":
        """See `Model.head_shape`: one of its own layers, dense, without window and sinks."""
        return replace(
            self, num_layers=1, windows=(), experts=None, has_sinks=False, is_merged=False
        )

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """None: a checkpoint has only the model's tensors."""
        return ()

    def specs(self, names: Collection[str] = ()) -> LlamaParams:
        """See `Model.specs`; only experts have more than one layout."""
        prefix, dim = "model", self.hidden_size
        return LlamaParams(
            embedding=stored(
                [f"{prefix}.embed_tokens.weight"], (self.vocab_size, dim), axes=("vocab", None)
            ),
            layers=tuple(
                layer_specs(self, f"{prefix}.layers.{i}", names, i not in self.dense_layers)
                for i in range(self.num_layers)
            ),
            norm=stored([f"{prefix}.norm.weight"], (dim,)),
            lm_head=None
            if self.tie_word_embeddings
            else projection(["lm_head.weight"], dim, [self.vocab_size], axes=(None, "vocab")),
        )

    def mixture_specs(self, prefix: str, names: Collection[str]) -> MoE:
        """Return the mixture of a layer as `TensorSpec`s; `names` are those in the checkpoint."""
        assert self.experts is not None, "a mixture of no experts"
        return moe_specs(self.experts, self.hidden_size, prefix, names)

    def extend(
        self,
        params: LlamaParams,
        tokens: jax.Array,
        rows: Rows,
        caches: tuple[Any, ...] | None,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[Features, tuple[Any, ...]]:
        """See `Model.extend`."""
        kinds, places = self.cache_kinds, self.layer_kinds
        held = list(caches or (None,) * len(kinds))
        x = self.embed(params, tokens)
        stream = Residual(x, jnp.zeros_like(x))
        angles = self.rope.angles(rows.positions)
        entering = []
        for i, layer in enumerate(params.layers):
            entering.append(stream)
            place, index = places[i], jnp.int32(places[:i].count(places[i]))
            stream, held[place] = decoder_layer(
                layer, stream, rows, angles, held[place], index, self, kinds[place]
            )
        entering.append(stream)
        _, hidden = stream.normed(params.norm, self, rows.kernels)
        return Features.of(hidden, [entering[i].sum() for i in aux_layers]), tuple(held)

    def embed(self, params: LlamaParams, tokens: jax.Array) -> jax.Array:
        """Return the input embeddings [N, D] of tokens i32[N]."""
        return params.embedding[tokens]

    def logits(self, params: LlamaParams, hidden: jax.Array) -> jax.Array:
        """Return the next-token logits f32[N, V] of hidden states [N, D]."""
        head = params.embedding.T if params.lm_head is None else params.lm_head
        return linear(hidden, head, jnp.float32)


# Traced once per kind of layer, because the index within the kind is an operand; XLA inlines the
# calls.
@partial(jax.jit, static_argnames=("model", "kind"))
def decoder_layer(
    params: LlamaLayer,
    stream: Residual,
    rows: Rows,
    angles: tuple[jax.Array, jax.Array],
    kv: Any,
    layer: jax.Array,
    model: Llama,
    kind: PagedAttention,
) -> tuple[Residual, Any]:
    """Run one pre-norm decoder layer, the `layer`-th of those with the cache `kv` of `kind`."""
    x, normed = stream.normed(params.attention_norm, model, rows.kernels)
    scales = model.rope.query_scales(rows.positions)
    mixed, kv = attention(params.attention, normed, rows, angles, kv, layer, kind, scales)
    x, normed = Residual(x, mixed).normed(params.mlp_norm, model, rows.kernels)
    return Residual(x, feed_forward(params.mlp, normed, model.experts, rows)), kv


def layer_specs(
    model: Llama, prefix: str, names: Collection[str] = (), is_sparse: bool = True
) -> LlamaLayer:
    """Return one decoder layer as a tree of `TensorSpec`; `names` are those in the checkpoint."""
    dim = model.hidden_size
    return LlamaLayer(
        attention_norm=stored([f"{prefix}.input_layernorm.weight"], (dim,)),
        attention=attention_specs(model, f"{prefix}.self_attn", dim),
        mlp_norm=stored([f"{prefix}.post_attention_layernorm.weight"], (dim,)),
        mlp=mlp_specs(f"{prefix}.mlp", dim, model.intermediate_size, model.is_merged)
        if model.experts is None or not is_sparse
        else model.mixture_specs(f"{prefix}.mlp", names),
    )


def attention_specs(model: Llama, prefix: str, num_in: int) -> Attention:
    """Return attention weights as `TensorSpec`s; `num_in` is the projections' input width."""
    q, kv, head = (
        model.num_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
        model.head_dim,
    )
    inputs, sizes = [f"{prefix}.{name}_proj" for name in "qkv"], [q, kv, kv]
    if model.is_merged:
        inputs, sizes = [f"{prefix}.qkv_proj"], [q + 2 * kv]
    return Attention(
        qkv=projection([f"{name}.weight" for name in inputs], num_in, sizes, axes=(None, "heads")),
        out=projection([f"{prefix}.o_proj.weight"], q, [model.hidden_size], axes=("heads", None)),
        qkv_bias=stored(
            [f"{name}.bias" for name in inputs], *((n,) for n in sizes), axes=("heads",)
        )
        if model.qkv_bias
        else None,
        out_bias=stored([f"{prefix}.o_proj.bias"], (model.hidden_size,))
        if model.out_bias
        else None,
        q_norm=stored([f"{prefix}.q_norm.weight"], (head,)) if model.qk_norm else None,
        k_norm=stored([f"{prefix}.k_norm.weight"], (head,)) if model.qk_norm else None,
        sinks=stored([f"{prefix}.sinks"], (model.num_heads,), axes=("heads",))
        if model.has_sinks
        else None,
    )


def from_hf(hf: HFConfig) -> Llama:
    """Return the model that a Hugging Face config of the family describes."""
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
        max_position=hf.integer("max_position_embeddings", 2048),
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
