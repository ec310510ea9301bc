"""DFlash (Chen et al. 2026): all drafts of a round in one pass over a block of mask tokens.

    context   g_p = norm(fc f_p) for each position p that the target has run
              each layer stores the keys and values of g_p in its cache at position p
    block     rows [e(x_n), e(MASK), ..., e(MASK)] at positions n, n + 1, ..., n + K
              through decoder layers, each with an `AttentionMask` over context and block
    drafts    row j gives the logits of the token at n + j; a `Refinement` can change them

f_p are hidden states of some of the target's layers, fc is a matrix and e is the embedding. x_n is
the last token, which the target has not run yet.

Running the block writes its keys and values at its positions. After the target has run these
positions, `observe` overwrites the block's keys and values with the context's. The block can be
smaller than in training.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import rms_norm
from specjax.checkpoint.spec import stored
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.paged import PagedAttention
from specjax.device.cache.pages import Pages
from specjax.device.cache.rows import CachedRows, padded_width
from specjax.device.drafters.checkpoint import (
    PUBLISHED_BESIDE,
    embed_tokens,
)
from specjax.device.drafters.drafter import DraftContext, Observation, Params
from specjax.device.drafters.head import HeadDrafter, ShapedHead, on_rows
from specjax.device.models.decoder import DecoderLayer, decoder_layer
from specjax.device.models.layers.residual import Residual
from specjax.device.models.layers.rope import Angles
from specjax.device.models.layers.rows import Rows
from specjax.device.models.llama import Llama
from specjax.device.models.model import Model
from specjax.device.verification import Draft
from specjax.device.vocabulary import WHOLE
from specjax.device.weights.matrix import Matrix, dense
from specjax.device.weights.table import Table, table

# Tensors of a head that are not loaded as weights.
UNUSED = "d2t", "t2d", "confidence_head.proj.weight", "confidence_head.proj.bias"
# The tensor that holds the mask token's embedding, used instead of a row of the embedding table.
MASK_EMBEDDING = "mask_embedding"
# transformers' names of the tensors that other layouts call fc and hidden_norm.
ENCODER_NAMES = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DFlashParams:
    """Weights of a DFlash head. A is the number of target layers whose hidden states it reads.

    `embedding` and `lm_head` are None if the head uses the target's weights.
    """

    embedding: Table | None  # [V, D]
    context_fc: Matrix  # [A D_target, D]
    context_norm: jax.Array  # [D]
    layers: tuple[DecoderLayer, ...]
    norm: jax.Array  # [D]
    lm_head: Matrix | None  # [D, V_d]
    mask: jax.Array | None = None  # [D], e(MASK); None if it is a row of the embedding
    refinement: Any = None
    target_ids: jax.Array | None = None  # i32[V_d]


@dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """The positions that a row of a block attends to ("sees") in a layer.

    The first seen position is `back` positions before the row, or before the block's first row if
    `is_anchored`. The last seen position is `ahead` positions after the row, but not after the end
    of the block.
    """

    back: int | None = None  # None: all earlier positions are seen
    ahead: int | None = None  # None: the whole block is seen
    is_anchored: bool = False  # whether `back` counts from the block's first row

    @property
    def window(self) -> int | None:
        """The layer's attention window in tokens; None for no window."""
        return None if self.back is None else self.back + 1

    def sees(self, row: jax.Array, other: jax.Array) -> jax.Array:
        """Return whether the block's row `row` sees the position `other`.

        Both numbers count from the block's first row. `other` is at most the block's last row.
        """
        is_seen = jnp.array(True) if self.ahead is None else other <= row + self.ahead
        if self.back is None:
            return is_seen
        return is_seen & (other >= (0 if self.is_anchored else row) - self.back)

    def of(self, rows: CachedRows, starts: jax.Array, num_rows: int) -> CachedRows:
        """Return `rows` with fields that make attention apply this mask (`reach` and `origin`).

        `rows` are one block of rows per request. The block of request b starts at position
        `starts[b]`, and has `num_rows` rows and perhaps padding rows.
        """
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
    """The changes that an extension of DFlash makes to the head. This base class makes none."""

    embedding_scale: float = 1.0  # multiplies the block's embedded tokens
    is_serial: ClassVar[bool] = False  # whether a draft's logits depend on the previous draft

    def specs(self, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> Any:
        """Return the refinement's weights outside the layers, as a tree of `TensorSpec`."""

    def layer_specs(self, shape: Llama, name: str) -> Any:
        """Return the weights of the layer `name` as a `DecoderLayer` of `TensorSpec`s."""
        return shape.layer_specs(name)

    def layer(
        self,
        params: Any,
        stream: Residual,
        rows: Any,  # of a block
        angles: Angles,
        kv: Any,
        index: jax.Array,
        shape: Llama,
        kind: PagedAttention,
    ) -> tuple[Residual, Any]:
        """Run the `index`-th layer on a block's rows; see `decoder_layer`."""
        return decoder_layer(params, stream, rows, angles, kv, index, shape, kind)

    def of_block(self, params: Any, hidden: jax.Array, logits: jax.Array) -> Any:
        """Compute the input `block` of the method `logits`, for all drafts at once.

        Args:
            params: the weights that `specs` describes.
            hidden: [B, K, D] the normed hidden states of the rows that give drafts.
            logits: f32[B, K, V_d] the logits of these rows before refinement.

        Returns:
            A tree of arrays [B, K, ...]. For draft i, the method `logits` gets the slices [:, i].
        """
        return logits

    def logits(self, params: Any, block: Any, previous: jax.Array) -> jax.Array:
        """Return the refined logits f32[B, V_d] of one draft per request.

        `block` [B, ...] is the part of `of_block`'s result for these drafts. `previous` i32[B]
        holds the token before each draft. In serving, this method is called only if `is_serial` is
        true.
        """
        return block

    def trained(self, logits: jax.Array, refined: jax.Array) -> tuple[jax.Array, ...]:
        """Return the arrays of logits that training fits to the target's distributions.

        This base class returns only `refined`. An extension that also uses unrefined `logits`, for
        example to select candidates, returns both arrays.
        """
        return (refined,)


@dataclass(frozen=True, kw_only=True)
class DFlashHead(ShapedHead):
    """The sizes of a DFlash head. `shape` is a decoder with the head's layers."""

    shape: Llama
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    mask_token_id: int
    attention_masks: tuple[AttentionMask, ...]  # one per layer
    has_embedding: bool = False
    has_lm_head: bool = False
    has_mask: bool = False
    refinement: Refinement = Refinement()
    first_row: int = 1  # row of the block that gives the first draft
    prefix_in_target: None = None

    def specs(self, names: Collection[str] = ()) -> DFlashParams:
        """Return the weights, except the map `target_ids`, as `TensorSpec`s.

        The tensors have transformers' names if `names` contains such names, else the authors'
        names.
        """
        dim, num_in = self.shape.hidden_size, len(self.aux_layers) * self.target_hidden_size
        is_encoder = f"{ENCODER_NAMES['fc']}.weight" in names
        fc, norm = ENCODER_NAMES.values() if is_encoder else ENCODER_NAMES
        embedding = table(["embed_tokens.weight"], self.shape.table_size, dim)
        head = dense(["lm_head.weight"], dim, [self.draft_vocab_size])
        return DFlashParams(
            embedding=embedding if self.has_embedding else None,
            context_fc=dense([f"{fc}.weight"], num_in, [dim]),
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
        """Return the target's id of each draft token, i32[V_d]; None if the ids are the same."""
        return params.target_ids

    def logits(self, target: Model, params: Params, hidden: jax.Array) -> jax.Array:
        """Return draft logits f32[N, V_d] for normed hidden states [N, D]."""
        own = params.drafter.lm_head
        if own is None:
            return target.logits(params.target, hidden)
        logits = own.multiply(hidden, jnp.float32)
        return (
            logits
            if self.target_ids(params.drafter) is not None
            else target.vocabulary.part(logits)
        )


def first_layer(names: Collection[str]) -> str:
    """Return the name prefix of a head's first layer, given the names of the head's tensors."""
    return "midlayer" if any("midlayer." in name for name in names) else "layers.0"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DFlashState:
    """The head's KV cache, indexed by the target's page table."""

    kv: Pages  # [layers, pages, page_size, 2, H_kv, D]


@dataclass(frozen=True)
class DFlashDrafter(HeadDrafter[DFlashHead]):
    """A drafter that runs the head once per round."""

    def init_state(self, sizes: CacheSizes, dtype: Any) -> DFlashState:
        """Return a state with an empty cache."""
        return DFlashState(self.head.shape.attention.init(sizes, dtype))

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
        hidden, kv = self.run(own, self.embed(target, params, last, rows.width), seen, state.kv)
        hidden = rows.by_request(hidden)[:, first : first + k]  # rows that draft
        logits = on_rows(
            partial(self.head.logits, target, params),
            hidden.reshape(batch * k, -1),
            context.row_multiple,
        ).reshape(batch, k, -1)

        refinement = self.head.refinement
        if not refinement.is_serial:
            return self.draw_together(target, params, context, logits), DFlashState(kv)

        # Refinements read the logits of all tokens.
        vocabulary = target.vocabulary if self.head.target_ids(own) is None else WHOLE
        block = refinement.of_block(own.refinement, hidden, vocabulary.whole(logits))

        def refined(i: int, drafts: Sequence[jax.Array]) -> jax.Array:
            mine = jax.tree.map(lambda x: x[:, i], block)
            logits = refinement.logits(own.refinement, mine, drafts[-1] if drafts else last)
            return vocabulary.part(logits)

        return self.draw_each(target, params, context, k, refined), DFlashState(kv)

    def _block(self, context: DraftContext, num_rows: int) -> CachedRows:
        """Return the rows of one block of tokens per request, with padding rows.

        Each request has `num_rows` real rows, which begin at the position of its last token.
        """
        starts, batch = context.starts, context.starts.shape[0]
        counts = jnp.where(context.is_active, num_rows, 0)
        width = padded_width(batch, num_rows, context.row_multiple)
        return CachedRows.starting_at(
            starts, counts, width, context.page_table, kernels=context.kernels
        )

    def embed(self, target: Model, params: Params, last: jax.Array, width: int) -> jax.Array:
        """Return the embeddings [B width, D] of one block of `width` rows per request.

        The first row of request b's block embeds the token `last[b]`. All other rows embed the
        mask token.
        """
        x, mask = embed_tokens(target, params, last), params.drafter.mask
        if mask is None:
            (mask,) = embed_tokens(target, params, jnp.full(1, self.head.mask_token_id))
        masks = jnp.broadcast_to(mask.astype(x.dtype), (len(x), width - 1, x.shape[1]))
        rows = jnp.concatenate([x[:, None], masks], axis=1).reshape(-1, x.shape[1])
        return rows * self.head.refinement.embedding_scale

    def run(
        self, params: DFlashParams, x: jax.Array, rows: Sequence[Rows], kv: Any
    ) -> tuple[jax.Array, Any]:
        """Run all layers on x [N, D]; return the normed output [N, D] and the new kv.

        `rows[i]` are the rows with the attention mask of layer i.
        """
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
        """See `Drafter.observe`."""
        states = seen.features.auxiliary
        assert states is not None, "the target was run without `aux_layers`"
        rows = replace(seen.rows, attends=False)
        return DFlashState(self.read(params.drafter, states, rows, state.kv))

    def read(self, params: DFlashParams, states: jax.Array, rows: Rows, kv: Any) -> Any:
        """Write the keys and values of `rows`, which the target has run; return the new kv.

        The keys and values are computed from `states` [N, A D_target], the concatenated hidden
        states of the A target layers that the head reads. The layers' other results are unused, so
        JAX or XLA removes them as dead code.
        """
        shape = self.head.shape
        fused = params.context_fc.multiply(states)
        fused = rms_norm(fused, params.context_norm, shape.rms_norm_eps)
        angles = shape.rope.angles(rows.positions)
        for i, layer in enumerate(params.layers):
            where = rows, angles, kv, jnp.int32(i), shape.attention
            _, kv = layer.attention.mix(fused, *where)
        return kv
