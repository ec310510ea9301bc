"""DFlash (Chen et al. 2026): all drafts of a round in one pass over a block of masks.

    context   g_p = norm(fc f_p)            f_p: hidden states of some of the target's layers
              K_l, V_l of every layer l from g_p, in the drafter's cache at position p
    block     rows [e(x_n), e(MASK), ..., e(MASK)] at positions n, n + 1, ..., n + K
              through decoder layers, each with an `AttentionMask` over context and block
    drafts    row j gives the token at n + j, whose logits a `Refinement` may change

x_n is the last token, which the target has not run. The block writes its own keys and values at its
positions; when the target has run these, `observe` writes the context's over them. K may be less
than the block that the head was trained with.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import rms_norm
from specjax.checkpoint.spec import projection, stored
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.paged import PagedAttention
from specjax.device.cache.rows import CachedRows, padded_width
from specjax.device.drafters.checkpoint import (
    PUBLISHED_BESIDE,
    embed_tokens,
    without_shared_embedding,
)
from specjax.device.drafters.drafter import DraftContext, Observation, Params
from specjax.device.models.layers.attention import attention
from specjax.device.models.layers.linear import linear
from specjax.device.models.layers.residual import Residual
from specjax.device.models.llama import Llama, LlamaLayer, decoder_layer, layer_specs
from specjax.device.models.model import Model
from specjax.device.verification import Draft

# Tensors that are not loaded as weights.
UNUSED = "d2t", "t2d", "confidence_head.proj.weight", "confidence_head.proj.bias"
# Where a head's own embedding of masks is found, in place of its row of the embedding.
MASK_EMBEDDING = "mask_embedding"
# transformers' names of two tensors that others call fc and hidden_norm.
ENCODER_NAMES = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DFlashParams:
    """Weights of a DFlash head; `embedding` and `lm_head` are None where they are the target's."""

    embedding: jax.Array | None  # [V, D]
    context_fc: jax.Array  # [A D_target, D]
    context_norm: jax.Array  # [D]
    layers: tuple[LlamaLayer, ...]
    norm: jax.Array  # [D]
    lm_head: jax.Array | None  # [D, V_d]
    mask: jax.Array | None = None  # [D], e(MASK), if it is not in the embedding
    refinement: Any = None
    target_ids: jax.Array | None = None  # i32[V_d]


@dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """What the rows of a block see in a layer: positions from `back` before a row on, or before the
    block's first row, up to `ahead` after the row, or to the end of the block."""

    back: int | None = None  # None: everything before
    ahead: int | None = None  # None: all of the block
    is_anchored: bool = False  # `back` counts from the block's first row

    @property
    def window(self) -> int | None:
        """The window of the layer's attention, in tokens; None for no limit."""
        return None if self.back is None else self.back + 1

    def of(self, rows: CachedRows, starts: jax.Array, num_rows: int) -> CachedRows:
        """Return rows of blocks from positions starts i32[B] with what they see; `num_rows` of each
        block are real."""
        own = rows.positions
        first = jnp.repeat(starts, rows.width)
        end = first + num_rows - 1
        reach = end if self.ahead is None else jnp.minimum(own + self.ahead, end)
        origin = first if self.is_anchored else own
        return replace(
            rows,
            reach=jnp.where(own >= 0, reach, -1),
            origin=None if self.back is None else origin,
        )


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """What heads of the family add to DFlash: this one nothing."""

    embedding_scale: float = 1.0  # of the block's embedded tokens

    def specs(self, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> Any:
        """Return the weights besides those of the layers as a tree of `TensorSpec`."""

    def layer_specs(self, shape: Llama, name: str) -> Any:
        """Return the weights of a layer of this name, a `LlamaLayer`, as `TensorSpec`s."""
        return layer_specs(shape, name)

    def layer(
        self,
        params: Any,
        stream: Residual,
        rows: CachedRows,
        angles: tuple[jax.Array, jax.Array],
        kv: jax.Array,
        index: jax.Array,
        shape: Llama,
        kind: PagedAttention,
    ) -> tuple[Residual, jax.Array]:
        """Run the `index`-th layer on a block's rows; see `decoder_layer`."""
        return decoder_layer(params, stream, rows, angles, kv, index, shape, kind)

    def logits(
        self, params: Any, hidden: jax.Array, logits: jax.Array, previous: jax.Array
    ) -> jax.Array:
        """Return a draft's logits f32[B, V_d] after the tokens `previous` i32[B].

        Args:
            params: the weights of `specs`.
            hidden: [B, D] the block's rows for the draft, normed.
            logits: f32[B, V_d] what these rows give by themselves.
        """
        return logits


@dataclass(frozen=True, kw_only=True)
class DFlashHead:
    """The sizes of a DFlash head. `shape` is a decoder with its layers."""

    shape: Llama
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    mask_token_id: int
    attention_masks: tuple[AttentionMask, ...]  # by layer
    has_embedding: bool = False
    has_lm_head: bool = False
    has_mask: bool = False
    refinement: Refinement = Refinement()
    first_row: int = 1  # of the block, that gives the first draft
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
            context_fc=projection([f"{fc}.weight"], num_in, [dim]),
            context_norm=stored([f"{norm}.weight"], (dim,)),
            layers=tuple(
                self.refinement.layer_specs(self.shape, name) for name in self._layer_names(names)
            ),
            norm=stored(["norm.weight"], (dim,)),
            lm_head=head if self.has_lm_head else None,
            mask=stored([MASK_EMBEDDING], (dim,)) if self.has_mask else None,
            refinement=self.refinement.specs(dim, self.shape.vocab_size, self.draft_vocab_size),
        )

    def _layer_names(self, names: Collection[str]) -> list[str]:
        return [first_layer(names), *(f"layers.{i}" for i in range(1, self.shape.num_layers))]

    def is_unused(self, name: str) -> bool:
        """See `DrafterWeights.is_unused`."""
        return name in (*PUBLISHED_BESIDE, *UNUSED, "lm_head.weight")

    def target_ids(self, params: DFlashParams) -> jax.Array | None:
        """Return the target's ids of the draft vocabulary."""
        return params.target_ids

    def logits(self, target: Model, params: Params, hidden: jax.Array) -> jax.Array:
        """Return draft logits f32[N, V_d] of normed hidden states."""
        own = params.drafter.lm_head
        if own is None:
            return target.logits(params.target, hidden)
        return linear(hidden, own, jnp.float32)


def first_layer(names: Collection[str]) -> str:
    """Return the first layer's name among the names of tensors."""
    return "midlayer" if any("midlayer." in name for name in names) else "layers.0"


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

    def num_passes(self, k: int) -> int:
        """Return 1, if there are drafts."""
        return min(k, 1)

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
        first = self.head.first_row
        rows = self._block(context, first + k)
        seen = [mask.of(rows, context.starts, first + k) for mask in self.head.attention_masks]
        last = context.history.tokens[jnp.arange(batch), context.starts]
        x = self._embed(target, params, last, rows.width)
        hidden, kv = self._run(own, x, seen, state.kv)
        hidden = rows.by_request(hidden)[:, first : first + k]  # of the rows that draft
        flat = hidden.reshape(batch * k, -1)
        flat = jnp.pad(flat, ((0, -(batch * k) % context.row_multiple), (0, 0)))
        logits = self.head.logits(target, params, flat)[: batch * k].reshape(batch, k, -1)
        drafts: list[jax.Array] = []
        probs: list[jax.Array] = []
        for i in range(k):
            row, previous = logits[:, i], drafts[-1] if drafts else last
            row = self.head.refinement.logits(own.refinement, hidden[:, i], row, previous)
            token, q = context.draw(
                row, own.target_ids, target.vocab_size, drafts, is_greedy=self.is_greedy
            )
            drafts.append(token)
            probs += [] if q is None else [q]
        return Draft.stacked(drafts, probs, batch), DFlashState(kv)

    def _block(self, context: DraftContext, num_rows: int) -> CachedRows:
        """Return the real rows of a block, `num_rows` per request from its last token on."""
        starts, batch = context.starts, context.starts.shape[0]
        counts = jnp.where(context.is_active, num_rows, 0)
        width = padded_width(batch, num_rows, context.row_multiple)
        return CachedRows.starting_at(
            starts, counts, width, context.page_table, kernels=context.kernels
        )

    def _embed(self, target: Model, params: Params, last: jax.Array, width: int) -> jax.Array:
        """Return rows [B width, D] of tokens i32[B], each followed by masks."""
        x, mask = embed_tokens(target, params, last), params.drafter.mask
        if mask is None:
            (mask,) = embed_tokens(target, params, jnp.full(1, self.head.mask_token_id))
        masks = jnp.broadcast_to(mask.astype(x.dtype), (len(x), width - 1, x.shape[1]))
        rows = jnp.concatenate([x[:, None], masks], axis=1).reshape(-1, x.shape[1])
        return rows * self.head.refinement.embedding_scale

    def _run(
        self, params: DFlashParams, x: jax.Array, rows: list[CachedRows], kv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Run rows x [N, D] through all layers, each with its own `rows`; return them normed, and
        kv."""
        shape = self.head.shape
        stream, angles = Residual(x, jnp.zeros_like(x)), shape.rope.angles(rows[0].positions)
        for i, (layer, mask) in enumerate(
            zip(params.layers, self.head.attention_masks, strict=True)
        ):
            kind = replace(shape.attention, window=mask.window)
            where = rows[i], angles, kv, jnp.int32(i), shape, kind
            stream, kv = self.head.refinement.layer(layer, stream, *where)
        return stream.normed(params.norm, shape, rows[0].kernels)[1], kv

    def observe(
        self, target: Model, params: Params, state: DFlashState, seen: Observation
    ) -> DFlashState:
        """See `Drafter.observe`. Of each layer only keys and values are used: JAX or XLA removes
        the rest as dead code."""
        own, shape = params.drafter, self.head.shape
        assert seen.features.auxiliary is not None, "the target was run without `aux_layers`"
        fused = linear(seen.features.auxiliary, own.context_fc)
        fused = rms_norm(fused, own.context_norm, shape.rms_norm_eps)
        angles, kv = shape.rope.angles(seen.rows.positions), state.kv
        for i, layer in enumerate(own.layers):
            where = seen.rows, angles, kv, jnp.int32(i), shape.attention
            _, kv = attention(layer.attention, fused, *where)
        return DFlashState(kv)
