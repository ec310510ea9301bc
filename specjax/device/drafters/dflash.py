"""DFlash (Chen et al. 2026): all drafts of a round in one pass over a block of masks.

    context   g_p = norm(fc f_p)            f_p: hidden states of some of the target's layers
              K_l, V_l of every layer l from g_p, in the drafter's cache at position p
    block     rows [e(x_n), e(MASK), ..., e(MASK)] at positions n, n + 1, ..., n + K
              through decoder layers; in each, a row sees a `BlockSpan` of the context and the block
    drafts    row j gives the token at n + j

x_n is the last token, which the target has not run. The block writes its own keys and values at its
positions; when the target has run these, `observe` writes the context's over them. K may be less
than the block that the head was trained with.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import rms_norm
from specjax.checkpoint.spec import projection, stored
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows, padded_width
from specjax.device.drafters.checkpoint import (
    PUBLISHED_BESIDE,
    embed_tokens,
)
from specjax.device.drafters.drafter import DraftContext, Observation, Params
from specjax.device.drafters.head import HeadDrafter, on_rows
from specjax.device.models.layers.attention import attention
from specjax.device.models.layers.linear import linear
from specjax.device.models.layers.residual import Residual
from specjax.device.models.layers.rows import Rows
from specjax.device.models.llama import Llama, LlamaLayer, decoder_layer, layer_specs
from specjax.device.models.model import Model
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
class BlockSpan:
    """What the rows of a block see in a layer: positions from `back` before a row on, or before the
    block's first row, up to `ahead` after the row, or to the end of the block."""

    back: int | None = None  # None: everything before
    ahead: int | None = None  # None: all of the block
    is_anchored: bool = False  # `back` counts from the block's first row

    @property
    def window(self) -> int | None:
        """The window of the layer's attention, in tokens; None for no limit."""
        return None if self.back is None else self.back + 1

    def sees(self, row: jax.Array, other: jax.Array) -> jax.Array:
        """Return whether a row of the block sees another position; both count from the first row,
        and `other` is at most the last."""
        is_seen = jnp.array(True) if self.ahead is None else other <= row + self.ahead
        if self.back is None:
            return is_seen
        return is_seen & (other >= (0 if self.is_anchored else row) - self.back)

    def of(self, rows: CachedRows, starts: jax.Array, k: int) -> CachedRows:
        """Return rows of a block with what they see: starts i32[B] are its positions, k + 1 rows
        of each are real."""
        own = rows.positions
        first = jnp.repeat(starts, rows.width)
        end = first + k
        reach = end if self.ahead is None else jnp.minimum(own + self.ahead, end)
        origin = first if self.is_anchored else own
        return replace(
            rows,
            reach=jnp.where(own >= 0, reach, -1),
            origin=None if self.back is None else origin,
        )


@dataclass(frozen=True, kw_only=True)
class DFlashHead:
    """The sizes of a DFlash head. `shape` is a decoder with its layers, `spans` what they see."""

    shape: Llama
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    mask_token_id: int
    spans: tuple[BlockSpan, ...]
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
class DFlashDrafter(HeadDrafter[DFlashHead]):
    """A drafter that runs a head once per round."""

    def init_state(self, sizes: CacheSizes, dtype: Any) -> DFlashState:
        """Return an empty cache."""
        return DFlashState(self.head.shape.attention.init(sizes, dtype))

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
        seen = [span.of(rows, context.starts, k) for span in self.head.spans]
        hidden, kv = self.run(own, embed_tokens(target, params, tokens), seen, state.kv)
        # Logits of the rows that draft alone: row 0 has the last token.
        hidden = rows.by_request(hidden)[:, 1 : k + 1].reshape(batch * k, -1)
        logits = on_rows(partial(self.head.logits, target, params), hidden, context.row_multiple)
        logits = logits.reshape(batch, k, -1)
        return self.draw_each(target, params, context, logits), DFlashState(kv)

    def _block(self, context: DraftContext, k: int) -> CachedRows:
        """Return k + 1 rows per request from its last token on."""
        starts, batch = context.starts, context.starts.shape[0]
        counts = jnp.where(context.is_active, k + 1, 0)
        width = padded_width(batch, k + 1, context.row_multiple)
        return CachedRows.starting_at(
            starts, counts, width, context.page_table, kernels=context.kernels
        )

    def run(
        self, params: DFlashParams, x: jax.Array, rows: Sequence[Rows], kv: Any
    ) -> tuple[jax.Array, Any]:
        """Run rows x [N, D] through all layers, as `rows` of each; return them normed, and kv."""
        shape = self.head.shape
        stream, angles = Residual(x, jnp.zeros_like(x)), shape.rope.angles(rows[0].positions)
        for i, (layer, span) in enumerate(zip(params.layers, self.head.spans, strict=True)):
            kind = replace(shape.attention, window=span.window)
            where = rows[i], angles, kv, jnp.int32(i), shape, kind
            stream, kv = decoder_layer(layer, stream, *where)
        return stream.normed(params.norm, shape, rows[0].kernels)[1], kv

    def observe(
        self, target: Model, params: Params, state: DFlashState, seen: Observation
    ) -> DFlashState:
        """See `Drafter.observe`."""
        states = seen.features.auxiliary
        assert states is not None, "the target was run without `aux_layers`"
        return DFlashState(self.read(params.drafter, states, seen.rows, state.kv))

    def read(self, params: DFlashParams, states: jax.Array, rows: Rows, kv: Any) -> Any:
        """Return kv with the keys and values of the target's states [N, A D_target] at `rows`. Of
        each layer only these are used: JAX or XLA removes the rest as dead code."""
        shape = self.head.shape
        fused = rms_norm(linear(states, params.fc), params.hidden_norm, shape.rms_norm_eps)
        angles = shape.rope.angles(rows.positions)
        for i, layer in enumerate(params.layers):
            where = rows, angles, kv, jnp.int32(i), shape.attention
            _, kv = attention(layer.attention, fused, *where)
        return kv
