"""EAGLE-3 (Li et al. 2025): a decoder layer that reads three of the target's hidden states.

    g = fc [h_low; h_mid; h_high] (+ bias)        for rows that the target has run
    u = [norm_e(e(x_{p+1})); norm_h(g)]           2 D wide
    a = r + Attn(u),  y = a + MLP(norm(a))        r = g, or norm_h(g) with `norm_before_residual`
    logits = head norm(y)                         usually over a reduced vocabulary

There can be more than three hidden states h, each a residual stream of the target. EAGLE-3.1 can
apply a norm to each h before fc. Some heads read no h: their g is the target's normed output. For
each draft after the first, g is the previous y, or norm(y) if `recycle_normed` is true. A head with
the full vocabulary can use the target's output head.
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
from specjax.checkpoint.spec import stored
from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheKind
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.checkpoint import (
    PUBLISHED_BESIDE,
    DrafterFiles,
    cannot_matter,
    embed_tokens,
    read_target_ids,
)
from specjax.device.drafters.drafter import Params
from specjax.device.drafters.head import ShapedHead
from specjax.device.models import llama
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.attention import Attention
from specjax.device.models.layers.mlp import MLP, mlp, mlp_specs
from specjax.device.models.layers.residual import Residual
from specjax.device.models.layers.rows import Rows
from specjax.device.models.llama import Llama, attention_specs
from specjax.device.models.model import Features, Model
from specjax.device.parallel import specs_of
from specjax.device.weights.matrix import Matrix, dense
from specjax.device.weights.table import Table, table

_FUSING = "fc.", "fc_norm.", "input_norm."  # prefixes of tensors that fuse auxiliary states


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Eagle3Params:
    """Weights of an EAGLE-3 head, which reads A hidden states ("auxiliary states") of the target.

    `embedding` and `lm_head` are None if the head uses the target's weights instead. `fc` is None
    if A is 0.
    """

    embedding: Table | None  # [V, D]
    fc: Matrix | None  # [A D_target, D]
    input_norm: jax.Array | None  # [A D_target], over all auxiliary states before fc
    aux_norms: tuple[jax.Array, ...]  # [D_target] for each auxiliary state, before fc; () for none
    embedding_norm: jax.Array  # [D]
    hidden_norm: jax.Array  # [D]
    attention: Attention  # its input is 2 D wide
    mlp_norm: jax.Array  # [D]
    mlp: MLP
    norm: jax.Array  # [D]
    lm_head: Matrix | None  # [D, V_d]
    fc_bias: jax.Array | None = None  # [D]
    target_ids: jax.Array | None = None  # i32[V_d]


@dataclass(frozen=True, kw_only=True)
class Eagle3Head(ShapedHead):
    """The EAGLE-3 head. `shape` holds the layer's sizes and the target's vocabulary size."""

    shape: Llama
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    norm_before_residual: bool = False
    recycle_normed: bool = False
    has_input_norm: bool = False
    has_aux_norms: bool = False
    has_embedding: bool = False
    has_lm_head: bool = True
    has_fc_bias: bool = False
    prefix_in_target: None = None

    @property
    def hidden_size(self) -> int:
        """Width of the head's own hidden state."""
        return self.shape.hidden_size

    @property
    def cache_kind(self) -> CacheKind:
        """The cache kind of a single attention layer."""
        return self.shape.attention

    @property
    def feature_size(self) -> int:
        """The width of one row's concatenated auxiliary states."""
        return max(len(self.aux_layers), 1) * self.target_hidden_size

    def specs(self, names: Collection[str] = ()) -> Eagle3Params:
        """Return the weights, except the map `target_ids`, as `TensorSpec`s.

        `names` are the tensor names in the files. They show whether the files have the authors'
        layout or the layout of the library speculators.
        """
        layer = layer_name(names)
        dim, num_aux = self.hidden_size, len(self.aux_layers)
        wide, all_wide = self.target_hidden_size, self.feature_size
        lm_head = dense(["lm_head.weight"], dim, [self.draft_vocab_size])
        embedding = table(["embed_tokens.weight"], self.shape.table_size, dim)
        return Eagle3Params(
            embedding=embedding if self.has_embedding else None,
            fc=dense(["fc.weight"], all_wide, [dim]) if num_aux else None,
            fc_bias=stored(["fc.bias"], (dim,)) if self.has_fc_bias else None,
            input_norm=stored(["input_norm.weight"], (all_wide,)) if self.has_input_norm else None,
            aux_norms=tuple(stored([f"fc_norm.{i}.weight"], (wide,)) for i in range(num_aux))
            if self.has_aux_norms
            else (),
            embedding_norm=stored([f"{layer}.input_layernorm.weight"], (dim,)),
            hidden_norm=stored([f"{layer}.hidden_norm.weight"], (dim,)),
            attention=attention_specs(self.shape, f"{layer}.self_attn", 2 * dim),
            mlp_norm=stored([f"{layer}.post_attention_layernorm.weight"], (dim,)),
            mlp=mlp_specs(f"{layer}.mlp", dim, self.shape.intermediate_size),
            norm=stored(["norm.weight"], (dim,)),
            lm_head=lm_head if self.has_lm_head else None,
        )

    def is_unused(self, name: str) -> bool:
        """See `DrafterWeights.is_unused`."""
        return name in PUBLISHED_BESIDE or cannot_matter(name)

    def fuse(self, params: Eagle3Params, features: Features) -> jax.Array:
        """Return g [N, D] for the target's `features`.

        g is fc of the auxiliary hidden states, which are normed first if the checkpoint has norms
        for them. For a head without auxiliary layers, g is the target's final hidden state.
        """
        if params.fc is None:
            return features.hidden
        states, eps = features.auxiliary, self.shape.rms_norm_eps
        assert states is not None, "the target was run without the head's aux_layers"
        if params.aux_norms:
            parts = jnp.split(states, len(self.aux_layers), axis=-1)
            normed = [rms_norm(x, w, eps) for x, w in zip(parts, params.aux_norms, strict=True)]
            states = jnp.concatenate(normed, axis=-1)
        if params.input_norm is not None:
            states = rms_norm(states, params.input_norm, eps)
        fused = params.fc.multiply(states)
        return fused if params.fc_bias is None else fused + params.fc_bias[None]

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
        """Return logits f32[N, V_d] over the draft vocabulary for the head's output `hidden`.

        `hidden` [N, D] is already normed if `recycle_normed` is true.
        """
        own = params.drafter
        if not self.recycle_normed:
            hidden = rms_norm(hidden, own.norm, self.shape.rms_norm_eps)
        if own.lm_head is None:
            return target.logits(params.target, hidden)
        logits = own.lm_head.multiply(hidden, jnp.float32)
        return logits if own.target_ids is not None else target.vocabulary.part(logits)

    def target_ids(self, params: Eagle3Params) -> jax.Array | None:
        """Return the target's id of each draft token, i32[V_d]; None if the ids are the same."""
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
    return stream.normed(params.norm, head.shape, rows.kernels)[1], kv


def first_layer(
    params: Eagle3Params,
    embedded: jax.Array,
    hidden: jax.Array,
    rows: Rows,
    kv: Any,
    head: Eagle3Head,
) -> tuple[Residual, Any]:
    """Run the first layer on the embeddings e [N, D] and the hidden states g [N, D].

    Return the layer's output y as a `Residual`, and the new kv.
    """
    shape, eps = head.shape, head.shape.rms_norm_eps
    normed = rms_norm(hidden, params.hidden_norm, eps)
    x = jnp.concatenate([rms_norm(embedded, params.embedding_norm, eps), normed], axis=-1)
    angles = shape.rope.angles(rows.positions)
    where = rows, angles, kv, jnp.int32(0), shape.attention
    mixed, kv = params.attention.mix(x, *where)
    stream = Residual(normed if head.norm_before_residual else hidden, mixed)
    residual, read = stream.normed(params.mlp_norm, shape, rows.kernels)
    return Residual(residual, mlp(params.mlp, read)), kv


def load(
    files: DrafterFiles, config: SpeculativeConfig, target: Model, dtype: np.dtype
) -> tuple[Eagle3Head, Eagle3Params]:
    """Load an EAGLE-3 head.

    The head's tensors have names in the authors' layout (`midlayer.*`) or in the layout of the
    library speculators (`layers.0.*`).
    """
    head = _read_chain_head(files, config, target)
    return head, load_weights(files, head, target, dtype)


def from_config(folder: Path, config: SpeculativeConfig, target: Model) -> ChainDrafter:
    """Return a drafter with the sizes in `folder`'s config. The folder needs no weights.

    Raises:
        CheckpointError: the drafter was made for another target, or has a separate draft
            vocabulary.
    """
    files = DrafterFiles.without_weights(folder)
    head = _read_chain_head(files, config, target)
    read_target_ids(files, head.draft_vocab_size, target)
    return ChainDrafter(head)


def _read_chain_head(files: DrafterFiles, config: SpeculativeConfig, target: Model) -> Eagle3Head:
    hf, shape = files.hf, files.geometry(layer_name(files.tensors.names()), target)
    head = read_head(files, config, target, shape)
    return replace(
        head,
        # The default is False in raw checkpoints, True in speculators' checkpoints.
        norm_before_residual=bool(hf.get("norm_before_residual", is_speculators(hf))),
        recycle_normed=recycles_normed(hf, head.has_aux_norms),
    )


def read_head(
    files: DrafterFiles, config: SpeculativeConfig, target: Model, shape: Llama
) -> Eagle3Head:
    """Return the head that the config and the tensor names describe.

    The caller must set `norm_before_residual` and `recycle_normed`. If the files have no weights,
    the head is assumed to have the usual tensors.

    Raises:
        CheckpointError: the head was made for another target, or config and tensors disagree.
    """
    has_weights = bool(files.tensors.names())
    layers = read_aux_layers(files.hf, target.num_layers, config.aux_id_convention)
    head = Eagle3Head(
        shape=shape,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=files.hf.integer("draft_vocab_size", shape.vocab_size),
        aux_layers=layers,
        has_input_norm=bool(layers) and files.has("input_norm.weight"),
        has_aux_norms=bool(layers) and files.has("fc_norm.0.weight"),
        has_fc_bias=bool(layers) and files.has("fc.bias"),
        has_embedding=files.has("embed_tokens.weight"),
        has_lm_head=files.has("lm_head.weight") or not has_weights,
    )
    if has_weights:
        _check_tensors(files, head)
    reads = {
        "the target's embedding": not head.has_embedding,
        "the target's output head": not head.has_lm_head,
        "the target's output without an fc": not layers,
    }
    if any(reads.values()) and head.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{files.hf.origin}: the drafter is {head.hidden_size} wide and uses "
            f"{' and '.join(what for what, is_so in reads.items() if is_so)}, which is "
            f"{target.hidden_size} wide; use a drafter trained for this target"
        )
    return head


def _check_tensors(files: DrafterFiles, head: Eagle3Head) -> None:
    """Raise `CheckpointError` if the config disagrees with the tensors' names or shapes."""
    hf, is_whole = files.hf, head.draft_vocab_size == head.shape.vocab_size
    if not head.has_lm_head and not is_whole:
        raise CheckpointError(
            f"{hf.origin}: draft_vocab_size={head.draft_vocab_size} needs a lm_head.weight, but "
            "the weights have none, and the target's output head covers all tokens"
        )
    for field, tensor in ("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight"):
        if hf.get(field, False) and head.aux_layers and not files.has(tensor):
            raise CheckpointError(
                f"{hf.origin}: {field}=true needs {tensor}, but the weights have none; export the "
                f"head again, or remove {field} if it was trained without"
            )
    is_third = files.has(f"{layer_name(files.tensors.names())}.hidden_norm.weight")
    if is_third and head.aux_layers and files.has("fc.weight"):
        rows, width = files.tensors.shape(files.stored_name("fc.weight"))
        if rows == head.hidden_size and width != head.feature_size:
            raise CheckpointError(
                f"{hf.origin}: fc.weight reads {width} numbers, but the {len(head.aux_layers)} "
                f"auxiliary layers {list(head.aux_layers)} of a target {head.target_hidden_size} "
                f"wide have {head.feature_size}; set eagle_aux_hidden_state_layer_ids to the "
                "layers used in training, or use a drafter trained for this target"
            )


def load_weights(files: DrafterFiles, head: Eagle3Head, target: Model, dtype: np.dtype) -> Any:
    """Load the parameters of a head, including the token ids of its draft vocabulary."""
    unused = ["d2t", "t2d"]
    if not head.aux_layers:
        names = (name.removeprefix(files.prefix) for name in files.tensors.names())
        if fusing := sorted(name for name in names if name.startswith(_FUSING)):
            unused += fusing
            files.log(
                f"{files.tensors.folder}: not used by the drafter, which reads no auxiliary "
                f"layers: {', '.join(fusing)}"
            )
    params = files.load(specs_of(head, files.tensors.names()), dtype, unused=tuple(unused))
    ids = read_target_ids(files, head.draft_vocab_size, target)
    if ids is not None and files.has("t2d"):  # t2d is the mask of the ids that d2t lists
        mask = files.tensors.read(files.stored_name("t2d"))
        if not np.array_equal(np.flatnonzero(mask), np.sort(np.asarray(ids))):
            files.log(
                f"{files.tensors.folder}: t2d and d2t list different tokens; d2t is used as the "
                "draft vocabulary"
            )
    return replace(params, target_ids=ids)


def layer_name(names: Collection[str]) -> str:
    """Return the name prefix of a head's first layer, given the names of the head's tensors."""
    is_numbered = any(name.endswith("layers.0.hidden_norm.weight") for name in names)
    return "layers.0" if is_numbered else "midlayer"


def is_speculators(hf: HFConfig) -> bool:
    """Return whether the config has the layout of the speculators library."""
    return "speculators_model_type" in hf.fields


def recycles_normed(hf: HFConfig, has_aux_norms: bool) -> bool:
    """Return whether each draft after the first reads norm(y) of the previous row, instead of y.

    The config's field `norm_output` says this, with one exception: the result is False for a head
    of architecture "LlamaForCausalLMEagle3" without norms of auxiliary states. In the configs of
    such heads, SpecForge used `norm_output` for the norm before the output head, which every head
    has.
    """
    if "LlamaForCausalLMEagle3" in hf.get("architectures", []) and not has_aux_norms:
        return False
    return bool(hf.get("norm_output", False))


def read_aux_layers(hf: HFConfig, num_layers: int, convention: str) -> tuple[int, ...]:
    """Return the target's layers whose input the head reads.

    `convention` says what a number i in the config means. "entering": the residual stream that
    enters layer i. "output": the output of layer i, which enters layer i + 1. If the config has no
    numbers, the layers are 2, L // 2 and L - 3, where L = `num_layers` is the target's number of
    layers. The tuple is empty if the config says that there are no auxiliary states.

    Raises:
        CheckpointError: the target has no such layers.
    """
    nested = hf.get("eagle_config", {})
    if nested.get("use_aux_hidden_state") is False:
        return ()
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
            f"{hf.origin}: auxiliary layers {list(layers)} are not all within the target's "
            f"0..{num_layers}; set eagle_aux_hidden_state_layer_ids, or use another drafter"
        )
    return layers


def to_hf(head: Eagle3Head) -> dict[str, Any]:
    """Return a head's `config.json` in the authors' format."""
    return {
        **llama.to_hf(head.shape),
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        **_aux_to_hf(head),
        "norm_before_residual": head.norm_before_residual,
        "norm_output": head.recycle_normed,
    }


def _aux_to_hf(head: Eagle3Head) -> dict[str, Any]:
    if not head.aux_layers:
        return {"eagle_config": {"use_aux_hidden_state": False}}
    return {"eagle_aux_hidden_state_layer_ids": list(head.aux_layers)}


def vocabulary_tensors(head: Eagle3Head, params: Eagle3Params) -> dict[str, np.ndarray]:
    """Return a head's tensors `d2t` and `t2d` in the authors' format.

    `d2t` i64[V_d] holds, for each draft id i, the target's id minus i. `t2d` bool[V] is true for
    tokens of the draft vocabulary. The dict is empty if the head has no separate draft vocabulary.
    """
    if params.target_ids is None:
        return {}
    ids = np.asarray(params.target_ids, np.int64)
    mask = np.zeros(head.shape.vocab_size, bool)
    mask[ids] = True
    return {"d2t": ids - np.arange(len(ids)), "t2d": mask}
