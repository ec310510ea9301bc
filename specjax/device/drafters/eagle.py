"""EAGLE-1 (Li et al. 2024): a decoder layer that reads an embedding and the target's feature.

    x = fc [e(t_{p+1}); f_p]
    a = x + Attn(x)
    y = a + MLP(norm(a))

t_{p+1} is the token at position p + 1, e is the embedding and fc is a matrix. There is no norm
before attention or after the layer.

The feature f_p is the target's hidden state at position p, after the target's final norm. The
output y is the input of the output head. It is also the feature that the head reads for the next
draft.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.spec import stored
from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheKind
from specjax.device.drafters.checkpoint import (
    PUBLISHED_BESIDE,
    DrafterFiles,
    cannot_matter,
    embed_tokens,
)
from specjax.device.drafters.drafter import Params
from specjax.device.drafters.head import ShapedHead
from specjax.device.models import llama
from specjax.device.models.layers.attention import Attention
from specjax.device.models.layers.mlp import MLP, mlp, mlp_specs
from specjax.device.models.layers.residual import Residual
from specjax.device.models.layers.rows import Rows
from specjax.device.models.llama import Llama, attention_specs
from specjax.device.models.model import Features, Model
from specjax.device.parallel import specs_of
from specjax.device.weights.matrix import Matrix, dense
from specjax.device.weights.table import Table, table


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EagleParams:
    """Weights of an EAGLE-1 head; `embedding` is None if the target's embedding is used."""

    embedding: Table | None  # [V, D]
    fc: Matrix  # [2 D, D]
    fc_bias: jax.Array | None  # [D]
    attention: Attention
    mlp_norm: jax.Array  # [D]
    mlp: MLP
    lm_head: Matrix | None = None  # [D, V]; None if the target's output head is used


@dataclass(frozen=True, kw_only=True)
class EagleHead(ShapedHead):
    """The EAGLE-1 head. It has the shapes of the first layer of the decoder `shape`."""

    shape: Llama
    has_fc_bias: bool = False
    has_embedding: bool = False
    has_lm_head: bool = False
    aux_layers: tuple[int, ...] = ()
    prefix_in_target: None = None

    @property
    def hidden_size(self) -> int:
        """The width of the features: the target's hidden size."""
        return self.shape.hidden_size

    @property
    def cache_kind(self) -> CacheKind:
        """The cache kind of a single attention layer."""
        return self.shape.attention

    def specs(self, names: Collection[str] = ()) -> EagleParams:
        """Return the weights as `TensorSpec`s.

        `names` is not used, because all checkpoints have the same names.
        """
        dim, layer = self.hidden_size, "layers.0"
        embedding = table(["embed_tokens.weight"], self.shape.table_size, dim)
        lm_head = dense(["lm_head.weight"], dim, [self.shape.vocab_size])
        return EagleParams(
            embedding=embedding if self.has_embedding else None,
            fc=dense(["fc.weight"], 2 * dim, [dim]),
            fc_bias=stored(["fc.bias"], (dim,)) if self.has_fc_bias else None,
            attention=attention_specs(self.shape, f"{layer}.self_attn", dim),
            mlp_norm=stored([f"{layer}.post_attention_layernorm.weight"], (dim,)),
            mlp=mlp_specs(f"{layer}.mlp", dim, self.shape.intermediate_size),
            lm_head=lm_head if self.has_lm_head else None,
        )

    def is_unused(self, name: str) -> bool:
        """See `DrafterWeights.is_unused`."""
        return name in PUBLISHED_BESIDE or cannot_matter(name)

    def fuse(self, params: EagleParams, features: Features) -> jax.Array:
        """Return the target's final hidden state, unchanged."""
        return features.hidden

    def extend(
        self,
        target: Model,
        params: Params,
        tokens: jax.Array,
        hidden: jax.Array,
        rows: Rows,
        kv: Any,
    ) -> tuple[jax.Array, Any]:
        """See `Head.extend`."""
        embedded = embed_tokens(target, params, tokens)
        return _layer(params.drafter, embedded, hidden, rows, kv, self)

    def logits(self, target: Model, params: Params, hidden: jax.Array) -> jax.Array:
        """Return the logits f32[N, V] for the head's output y = `hidden` [N, D], without a norm.

        The drafter's output head is used if the weights include it, else the target's.
        """
        own = params.drafter.lm_head
        if own is None:
            return target.logits(params.target, hidden)
        return target.vocabulary.part(own.multiply(hidden, jnp.float32))

    def target_ids(self, params: EagleParams) -> None:
        """Return None: drafts use the target's full vocabulary."""


@partial(jax.jit, static_argnames="head")
def _layer(
    params: EagleParams,
    embedded: jax.Array,
    hidden: jax.Array,
    rows: Rows,
    kv: Any,
    head: EagleHead,
) -> tuple[jax.Array, Any]:
    shape = head.shape
    x = params.fc.multiply(jnp.concatenate([embedded, hidden], axis=-1))
    if params.fc_bias is not None:
        x = x + params.fc_bias[None]
    angles = shape.rope.angles(rows.positions)
    where = rows, angles, kv, jnp.int32(0), shape.attention
    mixed, kv = params.attention.mix(x, *where)
    x, normed = Residual(x, mixed).normed(params.mlp_norm, shape, rows.kernels)
    return x + mlp(params.mlp, normed), kv


def load(
    files: DrafterFiles, config: SpeculativeConfig, target: Model, dtype: np.dtype
) -> tuple[EagleHead, EagleParams]:
    """Load an EAGLE-1 head in the authors' format.

    The config does not say whether fc has a bias, so the tensor names decide.
    """
    shape = files.geometry("layers.0", target)
    if shape.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{files.hf.origin}: hidden_size={shape.hidden_size} differs from the target's "
            f"{target.hidden_size}; use a drafter trained for this target"
        )
    head = EagleHead(
        shape=shape,
        has_fc_bias=files.has("fc.bias"),
        has_embedding=files.has("embed_tokens.weight"),
        has_lm_head=files.has("lm_head.weight"),
    )
    return head, files.load(specs_of(head), dtype)


def to_hf(head: EagleHead) -> dict[str, Any]:
    """Return a head's `config.json` in the authors' format."""
    return {**llama.to_hf(head.shape), "bias": head.has_fc_bias}
