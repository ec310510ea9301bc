"""DFlash (Chen et al. 2026): all drafts of a round in one pass over a block of masks.

    context   g_p = norm(fc f_p)            f_p: hidden states of some of the target's layers
              K_l, V_l of every layer l from g_p, in the drafter's cache at position p
    block     rows [e(x_n), e(MASK), ..., e(MASK)] at positions n, n + 1, ..., n + K
              through decoder layers, each row attending to the context and to all of the block
    drafts    row j gives the token at n + j

x_n is the last token, which the target has not run. The block writes its own keys and values at its
positions; when the target has run these, `observe` writes the context's over them. K may be less
than the block that the head was trained with.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rms_norm import rms_norm
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.spec import projection, stored
from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows, padded_width
from specjax.device.drafters.checkpoint import (
    PUBLISHED_BESIDE,
    DrafterFiles,
    embed_tokens,
    read_target_ids,
    without_shared_embedding,
)
from specjax.device.drafters.drafter import DraftContext, Observation, Params
from specjax.device.models import llama
from specjax.device.models.config_fields import refuse_quantised
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.attention import attention
from specjax.device.models.layers.linear import linear
from specjax.device.models.layers.residual import Residual
from specjax.device.models.llama import Llama, LlamaLayer, decoder_layer, layer_specs
from specjax.device.models.model import Model
from specjax.device.models.registry import read_config
from specjax.device.placement import Placement
from specjax.device.verification import Draft

# transformers' names of two tensors that others call fc and hidden_norm.
ENCODER_NAMES = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DFlashParams:
    """Weights of a DFlash head; `embedding` and `lm_head` are None where they are the target's."""

    embedding: jax.Array | None  # [V, D]
    fc: jax.Array  # [A D_target, D]
    hidden_norm: jax.Array  # [D]
    layers: tuple[LlamaLayer, ...]
    norm: jax.Array  # [D]
    lm_head: jax.Array | None  # [D, V_d]
    target_ids: jax.Array | None = None  # i32[V_d]


@dataclass(frozen=True, kw_only=True)
class DFlashHead:
    """The sizes of a DFlash head. `shape` is a decoder with its layers."""

    shape: Llama
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    mask_token_id: int
    is_causal: bool = False  # a row attends to the rows of the block before it only
    has_embedding: bool = False
    has_lm_head: bool = False
    prefix_in_target: None = None

    def specs(self, names: Collection[str] = ()) -> DFlashParams:
        """Return the float weights as `TensorSpec`s, by the authors' names or transformers'."""
        dim, num_in = self.shape.hidden_size, len(self.aux_layers) * self.target_hidden_size
        is_encoder = f"{ENCODER_NAMES['fc']}.weight" in names
        fc, norm = ENCODER_NAMES.values() if is_encoder else ENCODER_NAMES
        embedding = stored(
            ["embed_tokens.weight"], (self.shape.vocab_size, dim), axes=("vocab", None)
        )
        head = projection(["lm_head.weight"], dim, [self.draft_vocab_size], axes=(None, "vocab"))
        return DFlashParams(
            embedding=embedding if self.has_embedding else None,
            fc=projection([f"{fc}.weight"], num_in, [dim]),
            hidden_norm=stored([f"{norm}.weight"], (dim,)),
            layers=tuple(
                layer_specs(self.shape, f"layers.{i}") for i in range(self.shape.num_layers)
            ),
            norm=stored(["norm.weight"], (dim,)),
            lm_head=head if self.has_lm_head else None,
        )

    def is_unused(self, name: str) -> bool:
        """See `DrafterWeights.is_unused`."""
        return name in PUBLISHED_BESIDE or name == "lm_head.weight"

    def target_ids(self, params: DFlashParams) -> jax.Array | None:
        """Return the target's ids of the draft vocabulary."""
        return params.target_ids

    def logits(self, target: Model, params: Params, hidden: jax.Array) -> jax.Array:
        """Return draft logits f32[N, V_d] of normed hidden states."""
        own = params.drafter.lm_head
        if own is None:
            return target.logits(params.target, hidden)
        return linear(hidden, own, jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DFlashState:
    """The head's own cache, by the target's page table."""

    kv: jax.Array  # [layers, pages, page_size, 2, H_kv, D]


@dataclass(frozen=True)
class DFlashDrafter:
    """A drafter that runs a head once per round."""

    head: DFlashHead
    is_greedy: bool = False  # draft the argmax at any temperature

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input the head reads."""
        return self.head.aux_layers

    @property
    def weights(self) -> DFlashHead:
        """The head, which describes its weights."""
        return self.head

    def draft_slots(self, k: int) -> int:
        """Return 0: the block has as many rows as the target's round."""
        return 0

    def init_state(self, sizes: CacheSizes, dtype: Any) -> DFlashState:
        """Return an empty cache."""
        return DFlashState(self.head.shape.attention.init(sizes, dtype))

    def share(self, params: Any, target: Model, target_params: Any) -> tuple["DFlashDrafter", Any]:
        """See `Drafter.share`: drops an embedding that equals the target's."""
        head, params = without_shared_embedding(self.head, params, target, target_params)
        return replace(self, head=head), params

    def draft(
        self, target: Model, params: Params, state: DFlashState, context: DraftContext, k: int
    ) -> tuple[Draft, DFlashState]:
        """See `Drafter.draft`."""
        batch, own = context.starts.shape[0], params.drafter
        if not k:
            return Draft.stacked([], [], batch), state
        rows = self._block(context, k)
        last = context.history.tokens[jnp.arange(batch), context.starts]
        masks = jnp.full((batch, rows.width - 1), self.head.mask_token_id, jnp.int32)
        tokens = jnp.concatenate([last[:, None], masks], axis=1).reshape(-1)
        hidden, kv = self._run(own, embed_tokens(target, params, tokens), rows, state.kv)
        # Logits of the rows that draft alone: row 0 has the last token.
        hidden = rows.by_request(hidden)[:, 1 : k + 1].reshape(batch * k, -1)
        hidden = jnp.pad(hidden, ((0, -(batch * k) % context.row_multiple), (0, 0)))
        logits = self.head.logits(target, params, hidden)[: batch * k].reshape(batch, k, -1)
        drafts: list[jax.Array] = []
        probs: list[jax.Array] = []
        for i in range(k):
            token, q = context.draw(
                logits[:, i], own.target_ids, target.vocab_size, drafts, is_greedy=self.is_greedy
            )
            drafts.append(token)
            probs += [] if q is None else [q]
        return Draft.stacked(drafts, probs, batch), DFlashState(kv)

    def _block(self, context: DraftContext, k: int) -> CachedRows:
        """Return k + 1 rows per request from its last token on, each of which sees all of them."""
        starts, batch = context.starts, context.starts.shape[0]
        counts = jnp.where(context.is_active, k + 1, 0)
        width = padded_width(batch, k + 1, context.row_multiple)
        rows = CachedRows.starting_at(
            starts, counts, width, context.page_table, kernels=context.kernels
        )
        if self.head.is_causal:
            return rows
        ends = jnp.repeat(starts + k, width)
        return replace(rows, reach=jnp.where(rows.positions >= 0, ends, -1))

    def _run(
        self, params: DFlashParams, x: jax.Array, rows: CachedRows, kv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Run rows x [N, D] through all layers; return them normed, and kv."""
        shape = self.head.shape
        stream, angles = Residual(x, jnp.zeros_like(x)), shape.rope.angles(rows.positions)
        for i, layer in enumerate(params.layers):
            where = rows, angles, kv, jnp.int32(i), shape, shape.attention
            stream, kv = decoder_layer(layer, stream, *where)
        return stream.normed(params.norm, shape, rows.kernels)[1], kv

    def observe(
        self, target: Model, params: Params, state: DFlashState, seen: Observation
    ) -> DFlashState:
        """See `Drafter.observe`. Of each layer only keys and values are used: JAX or XLA removes
        the rest as dead code."""
        own, shape = params.drafter, self.head.shape
        assert seen.features.auxiliary is not None, "the target was run without `aux_layers`"
        fused = linear(seen.features.auxiliary, own.fc)
        fused = rms_norm(fused, own.hidden_norm, shape.rms_norm_eps)
        angles, kv = shape.rope.angles(seen.rows.positions), state.kv
        for i, layer in enumerate(own.layers):
            where = seen.rows, angles, kv, jnp.int32(i), shape.attention
            _, kv = attention(layer.attention, fused, *where)
        return DFlashState(kv)


def load(
    folder: Path | None,
    config: SpeculativeConfig,
    target: Model,
    dtype: np.dtype,
    placement: Placement,
) -> tuple[DFlashDrafter, DFlashParams]:
    """Load a head in the layout of its authors, of speculators, or of transformers.

    Raises:
        CheckpointError: it was made for another target, for fewer drafts, or is of a kind that is
            not supported.
    """
    assert folder is not None, config.method
    hf = read_config(folder)
    refuse_quantised(hf)
    files = DrafterFiles(open_checkpoint(folder), hf, placement)
    names = files.tensors.names()
    shape = _read_shape(hf, files)
    head = DFlashHead(
        shape=shape,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=hf.integer("draft_vocab_size", shape.vocab_size),
        aux_layers=_read_aux_layers(hf, target.num_layers, shape.num_layers),
        mask_token_id=_read_mask(hf, target),
        is_causal=bool(hf.get("is_causal", _own(hf).get("causal", False))),
        has_embedding=files.has("embed_tokens.weight"),
        has_lm_head=files.has("lm_head.weight"),
    )
    _check(files, head, config, target)
    params = files.load(head.specs(names), dtype, unused=("d2t", "t2d"))
    ids = read_target_ids(files, head.draft_vocab_size, target)
    drafter = DFlashDrafter(head, is_greedy=config.draft_sample_method == "greedy")
    return drafter, replace(params, target_ids=ids)


def _own(hf: HFConfig) -> dict[str, Any]:
    return hf.get("dflash_config", {})


def _read_shape(hf: HFConfig, files: DrafterFiles) -> Llama:
    fields = dict(hf.get("transformer_layer_config", hf.fields))
    kinds = fields.pop("layer_types", None) or []
    is_windowed = _own(hf).get("use_swa") or fields.get("use_sliding_window")
    if is_windowed or any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(
            f"{hf.origin}: layers with a sliding window are not supported; use a head whose "
            "layer_types are all full_attention"
        )
    shape = llama.from_hf(HFConfig({**fields, "model_type": "qwen3"}, hf.origin))
    layer = "layers.0.self_attn"
    return replace(
        shape,
        qkv_bias=files.has(f"{layer}.q_proj.bias"),
        out_bias=files.has(f"{layer}.o_proj.bias"),
        qk_norm=files.has(f"{layer}.q_norm.weight"),
    )


def _read_aux_layers(hf: HFConfig, num_layers: int, num_own: int) -> tuple[int, ...]:
    """Return the layers whose input the head reads: the outputs of the layers before them."""
    entering = hf.get("aux_hidden_state_layer_ids", None)  # of speculators
    outputs = _own(hf).get("target_layer_ids", hf.get("target_layer_ids", None))
    if entering is None and outputs is None:
        spread = max(num_own - 1, 1)
        outputs = [round(1 + i * (num_layers - 4) / spread) for i in range(num_own)]
        outputs = [num_layers // 2] if num_own == 1 else outputs
    layers = tuple(entering) if entering is not None else tuple(int(i) + 1 for i in outputs or ())
    if not layers or not all(0 <= i <= num_layers for i in layers):
        raise CheckpointError(
            f"{hf.origin}: the head reads layers {[i - 1 for i in layers]}, the target has 0.."
            f"{num_layers - 1}; use a drafter trained for this target"
        )
    return layers


def _read_mask(hf: HFConfig, target: Model) -> int:
    token = _own(hf).get("mask_token_id", hf.get("mask_token_id", None))
    if not isinstance(token, int) or not 0 <= token < target.vocab_size:
        raise CheckpointError(
            f"{hf.origin}: mask_token_id={token!r} must be one of the target's "
            f"{target.vocab_size} tokens"
        )
    return token


def _check(files: DrafterFiles, head: DFlashHead, config: SpeculativeConfig, target: Model) -> None:
    hf, k = files.hf, config.num_speculative_tokens
    block = hf.integer("block_size", 16)
    if k >= block:
        raise CheckpointError(
            f"{hf.origin}: block_size={block} is a token and {block - 1} drafts; lower "
            f"speculative_config.num_speculative_tokens={k}"
        )
    if files.has("mask_hidden"):
        raise CheckpointError(
            f"{hf.origin}: it has a mask_hidden, as P-EAGLE heads do, which are not supported"
        )
    if (files.tensors.folder / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{files.tensors.folder} has a mask_embedding.pt, which is not supported; put the "
            "embedding into embed_tokens.weight, at mask_token_id"
        )
    is_whole = head.has_embedding and head.has_lm_head
    if not is_whole and head.shape.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{hf.origin}: the head is {head.shape.hidden_size} wide and uses the target's "
            f"embedding or output head, which is {target.hidden_size} wide; use a drafter trained "
            "for this target"
        )
    if head.shape.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{hf.origin}: vocab_size={head.shape.vocab_size}, the target's is "
            f"{target.vocab_size}; use a drafter trained for this target"
        )
