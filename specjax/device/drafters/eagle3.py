"""EAGLE-3 (Li et al. 2025): a decoder layer over three of the target's hidden states.

    g = fc [h_low; h_mid; h_high]                 for rows the target has seen; else g = last y
    u = [norm_e(e(x_{p+1})); norm_h(g)]           2 D wide
    a = r + Attn(u),  y = a + MLP(norm(a))        r = g, or norm_h(g) with `norm_before_residual`
    logits = head norm(y)                         over a reduced vocabulary

The three are residual streams, un-normed. y is recycled as it is, or normed with `recycle_normed`.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rms_norm import rms_norm
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.spec import projection, stored
from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheKind
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.checkpoint import (
    PUBLISHED_BESIDE,
    DrafterFiles,
    embed_tokens,
    read_target_ids,
)
from specjax.device.drafters.drafter import Params
from specjax.device.models import llama
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.attention import Attention
from specjax.device.models.layers.linear import linear
from specjax.device.models.layers.mlp import MLP, mlp, mlp_specs
from specjax.device.models.layers.residual import NormedRows, Residual
from specjax.device.models.layers.rows import Rows
from specjax.device.models.llama import Llama, attention_specs
from specjax.device.models.model import Features, Model


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Eagle3Params:
    """Weights of an EAGLE-3 head; `embedding` is None where it is the target's."""

    embedding: jax.Array | None  # [V, D]
    fc: jax.Array  # [A D_target, D]
    input_norm: jax.Array | None  # [A D_target], over all auxiliary states before fc
    aux_norms: tuple[jax.Array, ...]  # A of [D_target], one per auxiliary state before fc; or none
    embedding_norm: jax.Array  # [D]
    hidden_norm: jax.Array  # [D]
    attention: Attention  # reads 2 D
    mlp_norm: jax.Array  # [D]
    mlp: MLP
    norm: jax.Array  # [D]
    lm_head: jax.Array  # [D, V_d]
    target_ids: jax.Array | None = None  # i32[V_d]


@dataclass(frozen=True, kw_only=True)
class Eagle3Head:
    """The EAGLE-3 head. `shape` gives the layer's geometry and the target's vocabulary."""

    shape: Llama
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    norm_before_residual: bool = False
    recycle_normed: bool = False
    has_input_norm: bool = False
    has_aux_norms: bool = False
    has_embedding: bool = False
    prefix_in_target: None = None

    @property
    def hidden_size(self) -> int:
        """Width of the head's own hidden state."""
        return self.shape.hidden_size

    @property
    def cache_kind(self) -> CacheKind:
        """One layer of attention."""
        return self.shape.attention

    def specs(self, names: Collection[str] = ()) -> Eagle3Params:
        """Return the float weights as `TensorSpec`s; `names` of the files tell the published layout
        from that of speculators."""
        layer = layer_name(names)
        dim, num_aux = self.hidden_size, len(self.aux_layers)
        wide = self.target_hidden_size
        embedding = stored(
            ["embed_tokens.weight"], (self.shape.vocab_size, dim), axes=("vocab", None)
        )
        return Eagle3Params(
            embedding=embedding if self.has_embedding else None,
            fc=projection(["fc.weight"], num_aux * wide, [dim]),
            input_norm=stored(["input_norm.weight"], (num_aux * wide,))
            if self.has_input_norm
            else None,
            aux_norms=tuple(stored([f"fc_norm.{i}.weight"], (wide,)) for i in range(num_aux))
            if self.has_aux_norms
            else (),
            embedding_norm=stored([f"{layer}.input_layernorm.weight"], (dim,)),
            hidden_norm=stored([f"{layer}.hidden_norm.weight"], (dim,)),
            attention=attention_specs(self.shape, f"{layer}.self_attn", 2 * dim),
            mlp_norm=stored([f"{layer}.post_attention_layernorm.weight"], (dim,)),
            mlp=mlp_specs(f"{layer}.mlp", dim, self.shape.intermediate_size),
            norm=stored(["norm.weight"], (dim,)),
            lm_head=projection(
                ["lm_head.weight"], dim, [self.draft_vocab_size], axes=(None, "vocab")
            ),
        )

    def is_unused(self, name: str) -> bool:
        """See `DrafterWeights.is_unused`."""
        return name in PUBLISHED_BESIDE

    def fuse(self, params: Eagle3Params, features: Features) -> jax.Array:
        """Return g = fc of the auxiliary hidden states, after norms if the checkpoint has them."""
        states, eps = features.auxiliary, self.shape.rms_norm_eps
        assert states is not None, "the target was run without the head's aux_layers"
        if params.aux_norms:
            parts = jnp.split(states, len(self.aux_layers), axis=-1)
            normed = [rms_norm(x, w, eps) for x, w in zip(parts, params.aux_norms, strict=True)]
            states = jnp.concatenate(normed, axis=-1)
        if params.input_norm is not None:
            states = rms_norm(states, params.input_norm, eps)
        return linear(states, params.fc)

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
        """Return logits over the draft vocabulary; a recycled state may already be normed."""
        own = params.drafter
        if not self.recycle_normed:
            hidden = rms_norm(hidden, own.norm, self.shape.rms_norm_eps)
        return linear(hidden, own.lm_head, jnp.float32)

    def target_ids(self, params: Eagle3Params) -> jax.Array | None:
        """Return the target's ids of the draft vocabulary."""
        return params.target_ids


@partial(jax.jit, static_argnames="head")
def _layer(
    params: Eagle3Params,
    embedded: jax.Array,
    hidden: jax.Array,
    rows: Rows,
    kv: Any,
    head: Eagle3Head,
) -> tuple[jax.Array, Any]:
    stream, kv = first_layer(params, embedded, hidden, rows, kv, head)
    if not head.recycle_normed:
        return stream.sum(), kv
    return stream.normed(params.norm, head.shape, rows.kernels)[1].value, kv


def first_layer(
    params: Eagle3Params,
    embedded: jax.Array,
    hidden: jax.Array,
    rows: Rows,
    kv: Any,
    head: Eagle3Head,
) -> tuple[Residual, Any]:
    """Run the layer that reads embeddings e [N, D] and hidden states g [N, D]; return y, and kv."""
    shape, eps = head.shape, head.shape.rms_norm_eps
    normed = rms_norm(hidden, params.hidden_norm, eps)
    x = jnp.concatenate([rms_norm(embedded, params.embedding_norm, eps), normed], axis=-1)
    angles = shape.rope.angles(rows.positions)
    where = rows, angles, kv, jnp.int32(0), shape.attention
    mixed, kv = params.attention.mix(NormedRows(x, None, rows.kernels), *where)
    stream = mixed.onto(normed if head.norm_before_residual else hidden, rows.kernels)
    residual, read = stream.normed(params.mlp_norm, shape, rows.kernels)
    return mlp(params.mlp, read).onto(residual, rows.kernels), kv


def load(
    files: DrafterFiles, config: SpeculativeConfig, target: Model, dtype: np.dtype
) -> tuple[Eagle3Head, Eagle3Params]:
    """An EAGLE-3 head in the published layout (`midlayer.*`) or speculators' (`layers.0.*`)."""
    head = _read_chain_head(files, config, target)
    return head, load_weights(files, head, target, dtype)


def from_config(folder: Path, config: SpeculativeConfig, target: Model) -> ChainDrafter:
    """Return a drafter of the sizes in a folder's config, which has no weights.

    Raises:
        CheckpointError: it was made for another target, or has a vocabulary of its own.
    """
    files = DrafterFiles.without_weights(folder)
    head = _read_chain_head(files, config, target)
    read_target_ids(files, head.draft_vocab_size, target)
    return ChainDrafter(head)


def _read_chain_head(files: DrafterFiles, config: SpeculativeConfig, target: Model) -> Eagle3Head:
    hf, shape = files.hf, files.geometry(layer_name(files.tensors.names()), target)
    return replace(
        read_head(files, config, target, shape),
        # The default is False in raw checkpoints, True in those of speculators.
        norm_before_residual=bool(hf.get("norm_before_residual", is_speculators(hf))),
        recycle_normed=recycles_normed(hf),
    )


def read_head(
    files: DrafterFiles, config: SpeculativeConfig, target: Model, shape: Llama
) -> Eagle3Head:
    """Return the head that the config and the tensors' names describe, but for what it recycles.

    Raises:
        CheckpointError: it was made for another target.
    """
    head = Eagle3Head(
        shape=shape,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=files.hf.integer("draft_vocab_size", shape.vocab_size),
        aux_layers=read_aux_layers(files.hf, target.num_layers, config.aux_id_convention),
        has_input_norm=files.has("input_norm.weight"),
        has_aux_norms=files.has("fc_norm.0.weight"),
        has_embedding=files.has("embed_tokens.weight"),
    )
    if not head.has_embedding and head.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{files.hf.origin}: the drafter is {head.hidden_size} wide and has no embedding of "
            f"its own, the target is {target.hidden_size} wide; use a drafter trained for this "
            "target"
        )
    return head


def load_weights(files: DrafterFiles, head: Eagle3Head, target: Model, dtype: np.dtype) -> Any:
    """Return the parameters of a head, with its draft vocabulary."""
    # t2d is the mask of the ids that d2t lists.
    params = files.load(head.specs(files.tensors.names()), dtype, unused=("d2t", "t2d"))
    return replace(params, target_ids=read_target_ids(files, head.draft_vocab_size, target))


def layer_name(names: Collection[str]) -> str:
    """Return the layer's prefix in a file with tensors of these names."""
    is_numbered = any(name.endswith("layers.0.hidden_norm.weight") for name in names)
    return "layers.0" if is_numbered else "midlayer"


def is_speculators(hf: HFConfig) -> bool:
    """Return whether the config has the layout of the speculators library."""
    return "speculators_model_type" in hf.fields


def recycles_normed(hf: HFConfig) -> bool:
    """Return whether the head recycles norm(y).

    In configs of speculators and vLLM `norm_output` means this. In those of SpecForge it means the
    norm before the head, which always exists: their heads recycle y.
    """
    if "LlamaForCausalLMEagle3" in hf.get("architectures", []):
        if not hf.get("norm_output", True):
            raise CheckpointError(f"{hf.origin}: norm_output=false (no norm) is not supported")
        return False
    return bool(hf.get("norm_output", False))


def read_aux_layers(hf: HFConfig, num_layers: int, convention: str) -> tuple[int, ...]:
    """Return the layers whose input the head reads; `convention`: how the config numbers them.

    "entering" i is the residual stream entering layer i, which is the output of layer i - 1; a
    config under "output" numbers that state i - 1. Default: 2, L // 2, L - 3, entering.
    """
    nested = hf.get("eagle_config", {})
    ids = hf.get(
        "eagle_aux_hidden_state_layer_ids",
        nested.get("eagle_aux_hidden_state_layer_ids", nested.get("layer_ids")),
    )
    if ids is None:
        layers = (2, num_layers // 2, num_layers - 3)
    else:
        layers = tuple(int(i) + (convention == "output") for i in ids)
    if not layers or not all(0 <= i <= num_layers for i in layers):
        raise CheckpointError(
            f"{hf.origin}: auxiliary layers {list(layers)} do not lie in 0..{num_layers}, the "
            "target's; set eagle_aux_hidden_state_layer_ids, or use another drafter"
        )
    return layers


def to_hf(head: Eagle3Head) -> dict[str, Any]:
    """Return the published `config.json` of a head."""
    return {
        **llama.to_hf(head.shape),
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(head.aux_layers),
        "norm_before_residual": head.norm_before_residual,
        "norm_output": head.recycle_normed,
    }


def vocabulary_tensors(head: Eagle3Head, params: Eagle3Params) -> dict[str, np.ndarray]:
    """Return d2t (offsets i64[V_d]) and t2d (mask bool[V]) of a head, as published."""
    if params.target_ids is None:
        return {}
    ids = np.asarray(params.target_ids, np.int64)
    mask = np.zeros(head.shape.vocab_size, bool)
    mask[ids] = True
    return {"d2t": ids - np.arange(len(ids)), "t2d": mask}


def float_params(params: Eagle3Params) -> Eagle3Params:
    """Return the parameters without the draft vocabulary, as `Eagle3Head.specs` has them."""
    return replace(params, target_ids=None)
