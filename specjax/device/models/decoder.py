"""The base of all decoders: an embedding, layers on one residual stream, a norm and a head.

Each model family adds its sizes, its cache kinds, and the weights of a layer.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import rms_norm
from specjax.checkpoint.division import Share, even, first_only
from specjax.checkpoint.spec import stored
from specjax.device.cache.kind import CacheKind
from specjax.device.cache.kinds_of_layers import divide_kinds
from specjax.device.models.layers.mlp import MLP, SWIGLU, Activation, mlp_specs
from specjax.device.models.layers.moe import Experts, MoE, moe_specs
from specjax.device.models.layers.residual import Residual
from specjax.device.models.layers.rope import Angles, Rope
from specjax.device.models.layers.rows import Rows
from specjax.device.models.model import Features
from specjax.device.placement import AXIS
from specjax.device.vocabulary import WHOLE, SplitVocabulary, Vocabulary
from specjax.device.weights.matrix import Matrix, dense
from specjax.device.weights.table import Table, table


class LayerNorms(NamedTuple):
    """Names of a layer's norms in checkpoints; None for a norm that layers do not have.

    a = x + norm_attention_out(Attention(norm_attention(x)))
    y = a + norm_mlp_out(MLP(norm_mlp(a)))
    """

    attention: str
    mlp: str
    attention_out: str | None = None
    mlp_out: str | None = None


PRE_NORMS = LayerNorms("input_layernorm", "post_attention_layernorm")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one decoder layer.

    The classes of `attention` and `mlp` determine the computation. A norm that the layer does not
    have is None (see `LayerNorms`).
    """

    attention_norm: jax.Array  # [D]
    attention: Any  # Attention, MLA or GatedDeltaNet
    attention_out_norm: jax.Array | None  # [D]
    mlp_norm: jax.Array  # [D]
    mlp: MLP | MoE
    mlp_out_norm: jax.Array | None  # [D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecoderParams:
    """Weights of a decoder; `lm_head` is None if the embedding is the output head."""

    embedding: Table  # [V, D]
    layers: tuple[DecoderLayer, ...]
    norm: jax.Array  # [D]
    lm_head: Matrix | None  # [D, V]

    @property
    def head(self) -> Any:
        """The output head, which turns hidden states into logits. It can be the embedding."""
        return self.embedding if self.lm_head is None else self.lm_head


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The base class of decoders. A decoder is hashable, so it can be a static argument of jit."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    rope: Rope
    max_position: int
    tie_word_embeddings: bool = False
    experts: Experts | None = None
    dense_layers: tuple[int, ...] = ()  # layers without experts, if `experts` is set
    activation: Activation = SWIGLU  # of feed-forward layers without experts
    norms: LayerNorms = PRE_NORMS
    embedding_scale: float = 1.0  # multiplies the embeddings that enter the first layer
    logit_cap: float | None = None  # c in c tanh(logit / c), which bounds logits
    num_devices: int = 1  # number of devices over which the weights are divided
    vocabulary: Vocabulary = WHOLE  # of the logits that `logits` returns
    divides_experts: bool = False  # whether each device has whole experts, instead of parts of all
    kept_layers: tuple[int, ...] = ()  # layers whose pages keep the model's dtype
    layer_scales: tuple[tuple[float, float], ...] = ()  # of each layer's pages; () if all are 1

    def __post_init__(self):
        assert self.own_kinds  # making the cache kinds checks the numbers of heads

    @property
    def has_centred_norms(self) -> bool:
        """Whether a norm's weight is stored as its scale minus one."""
        return False

    @property
    def own_kinds(self) -> tuple[CacheKind, ...]:
        """The model's cache kinds, without regard to the dtype of pages.

        `cache_kinds` has more kinds if only some layers of a kind are in `kept_layers`: these
        layers become a separate kind, because their pages keep the model's dtype.
        """
        raise NotImplementedError

    @property
    def own_layer_kinds(self) -> tuple[int, ...]:
        """Each layer's index into `own_kinds`."""
        raise NotImplementedError

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """See `Model.cache_kinds`."""
        return self._divided_kinds[0]

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """See `Model.layer_kinds`."""
        return self._divided_kinds[1]

    @property
    def _divided_kinds(self) -> tuple[tuple[CacheKind, ...], tuple[int, ...]]:
        own = self.own_kinds, self.own_layer_kinds
        return divide_kinds(*own, self.kept_layers, self.layer_scales)

    def with_pages(
        self, kept_layers: tuple[int, ...], layer_scales: tuple[tuple[float, float], ...]
    ) -> Self:
        """See `Model.with_pages`."""
        return replace(self, kept_layers=kept_layers, layer_scales=layer_scales)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding for each of `cache_kinds`."""
        return (self.rope,) * len(self.cache_kinds)

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """Empty: a checkpoint has only the model's tensors."""
        return ()

    @property
    def table_size(self) -> int:
        """The number of rows of the embedding: the vocabulary's size, or a device's part of it."""
        return self.vocabulary.num_columns(self.vocab_size)

    @property
    def shares(self) -> dict[str, Share]:
        """See `Model.shares`."""
        count, experts = self.num_devices, self.experts
        size = SplitVocabulary(self.vocab_size, count, AXIS).size
        shares = {
            "vocab": even(self.vocab_size, count, size),
            "mlp": even(self.intermediate_size, count),
            "first": first_only(count),
        }
        if experts is not None:
            if self.divides_experts:
                shares["experts"] = even(experts.num_experts, count)
            else:
                shares["inner"] = even(experts.intermediate_size, count, self.inner_multiple)
            shares["shared"] = even(experts.shared_intermediate_size, count)
        return shares

    @property
    def inner_multiple(self) -> int:
        """A number that must divide each device's part of the experts' inner width.

        The number is 1 if the width can be divided anywhere.
        """
        return 1

    @property
    def local(self) -> Self:
        """See `Model.local`."""
        if self.num_devices == 1:
            return self
        shares, experts = self.shares, self.experts
        if experts is not None:
            experts = experts._replace(shared_intermediate_size=shares["shared"].size)
            if self.divides_experts:
                experts = experts._replace(num_local=shares["experts"].size)
            else:
                experts = experts._replace(intermediate_size=shares["inner"].size)
        return replace(
            self,
            num_devices=1,
            vocabulary=SplitVocabulary(self.vocab_size, self.num_devices, AXIS),
            intermediate_size=shares["mlp"].size,
            experts=experts,
            **self.local_heads(shares),
        )

    def local_heads(self, shares: Mapping[str, Share]) -> dict[str, Any]:
        """Return one device's values of the fields that depend on the number of attention heads.

        The result maps field names to values. `shares` is the value of the property `shares`.
        """
        raise NotImplementedError

    def attention_specs(self, prefix: str, kind: int) -> Any:
        """Return the attention weights of a layer as `TensorSpec`s.

        `prefix` is the layer's name in checkpoints. `kind` is an index into `own_kinds`.
        """
        raise NotImplementedError

    def dense_specs(self, prefix: str) -> MLP:
        """Return the weights of the dense feed-forward layer `prefix` as `TensorSpec`s."""
        return mlp_specs(prefix, self.hidden_size, self.intermediate_size, self.activation)

    def mixture_specs(self, prefix: str, names: Collection[str]) -> MoE:
        """Return a layer's experts and router as `TensorSpec`s.

        `prefix` is the mixture's name in checkpoints. `names` are the checkpoint's tensor names.
        """
        assert self.experts is not None, "the model has no experts"
        return moe_specs(self.experts, self.hidden_size, prefix, names)

    def norm_spec(self, name: str, size: int | None = None) -> Any:
        """Return the weight [size] of the norm `name` as a `TensorSpec`.

        `size` defaults to the hidden size.
        """
        fill = 0.0 if self.has_centred_norms else None
        return stored([f"{name}.weight"], (size or self.hidden_size,), fill=fill)

    def layer_specs(
        self, prefix: str, names: Collection[str] = (), *, kind: int = 0, is_sparse: bool = False
    ) -> DecoderLayer:
        """Return the weights of the layer `prefix` as `TensorSpec`s.

        `names` are the checkpoint's tensor names. `kind` is an index into `own_kinds`.
        `is_sparse` says whether the layer has experts.
        """
        mlp = f"{prefix}.mlp"

        def norm(name: str | None) -> Any:
            return None if name is None else self.norm_spec(f"{prefix}.{name}")

        return DecoderLayer(
            attention_norm=norm(self.norms.attention),
            attention=self.attention_specs(prefix, kind),
            attention_out_norm=norm(self.norms.attention_out),
            mlp_norm=norm(self.norms.mlp),
            mlp=self.mixture_specs(mlp, names) if is_sparse else self.dense_specs(mlp),
            mlp_out_norm=norm(self.norms.mlp_out),
        )

    def specs(self, names: Collection[str] = ()) -> DecoderParams:
        """See `Model.specs`."""
        dim = self.hidden_size
        has_experts = self.experts is not None
        return DecoderParams(
            embedding=table(["model.embed_tokens.weight"], self.table_size, dim),
            layers=tuple(
                self.layer_specs(
                    f"model.layers.{i}",
                    names,
                    kind=kind,
                    is_sparse=has_experts and i not in self.dense_layers,
                )
                for i, kind in enumerate(self.own_layer_kinds)
            ),
            norm=self.norm_spec("model.norm"),
            lm_head=None
            if self.tie_word_embeddings
            else dense(["lm_head.weight"], dim, [self.table_size], columns="vocab"),
        )

    def extend(
        self,
        params: DecoderParams,
        tokens: jax.Array,
        rows: Rows,
        caches: tuple[Any, ...] | None,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[Features, tuple[Any, ...]]:
        """See `Model.extend`."""
        kinds, places, ropes = self.cache_kinds, self.layer_kinds, self.ropes
        held = list(caches or (None,) * len(kinds))
        x = self.embed(params, tokens)
        if self.embedding_scale != 1:
            # The scale is rounded to the model's dtype, as in transformers.
            x = x * jnp.asarray(self.embedding_scale, x.dtype)
        stream = Residual(x, jnp.zeros_like(x))
        angles = {rope: rope.angles(rows.positions) for rope in dict.fromkeys(ropes)}
        entering = []
        for i, layer in enumerate(params.layers):
            entering.append(stream)
            place, index = places[i], jnp.int32(places[:i].count(places[i]))
            stream, held[place] = decoder_layer(
                layer, stream, rows, angles[ropes[place]], held[place], index, self, kinds[place]
            )
        entering.append(stream)
        _, hidden = stream.normed(params.norm, self, rows.kernels)
        return Features.of(hidden, [entering[i].sum() for i in aux_layers]), tuple(held)

    def embed(self, params: DecoderParams, tokens: jax.Array) -> jax.Array:
        """See `Model.embed`."""
        return params.embedding.rows(tokens)

    def logits(self, params: DecoderParams, hidden: jax.Array) -> jax.Array:
        """See `Model.logits`."""
        logits, cap = params.head.multiply(hidden, jnp.float32), self.logit_cap
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return self.vocabulary.without_padding(logits)


# Traced once per kind of layer, because the layer's index in its cache is an operand; XLA inlines
# the calls.
@partial(jax.jit, static_argnames=("model", "kind"))
def decoder_layer(
    params: DecoderLayer,
    stream: Residual,
    rows: Rows,
    angles: Angles,
    cache: Any,
    layer: jax.Array,
    model: Decoder,
    kind: Any,
) -> tuple[Residual, Any]:
    """Run one decoder layer; return the residual stream after it, and the new cache.

    `cache` holds the arrays of the cache kind `kind`, for all layers of this kind. `layer` i32[] is
    the layer's index among the layers of this kind.
    """
    x, normed = stream.normed(params.attention_norm, model, rows.kernels)
    mixed, cache = params.attention.mix(normed, rows, angles, cache, layer, kind)
    mixed = _normed(mixed, params.attention_out_norm, model)
    x, normed = Residual(x, mixed).normed(params.mlp_norm, model, rows.kernels)
    fed = params.mlp.feed(normed, model, rows)
    return Residual(x, _normed(fed, params.mlp_out_norm, model)), cache


def _normed(x: jax.Array, weight: jax.Array | None, model: Decoder) -> jax.Array:
    """Return x [N, D] after a layer's output norm, or unchanged if `weight` is None."""
    if weight is None:
        return x
    return rms_norm(x, weight, model.rms_norm_eps, model.has_centred_norms)
