"""P-EAGLE (2026): an EAGLE-3 head of several layers that drafts all tokens in one pass.

    rows      (g_p, e(x_{p+1})) at the positions p that the target has run, as in EAGLE-3,
              then (g_mask, e(MASK)) at the next K - 1 positions, n to n + K - 2
    layers    the first layer is as in EAGLE-3, the others are decoder layers; all are causal
    drafts    rows n - 1, n, ..., n + K - 2 give the tokens at n + 1, ..., n + K

x_n is the last token. In mask rows, the weight `mask_hidden` replaces the target's hidden states:
g_mask is fc of this weight.

`observe` runs the rows at positions that the target has run, and keeps their keys and values.
`draft` runs the mask rows. The keys and values of mask rows are overwritten after the target has
run the positions of these rows.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.spec import stored
from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.pages import Pages
from specjax.device.cache.rows import CachedRows, padded_width
from specjax.device.drafters import eagle3
from specjax.device.drafters.checkpoint import DrafterFiles, embed_tokens, read_target_ids
from specjax.device.drafters.drafter import DraftContext, Observation, Params
from specjax.device.drafters.eagle3 import Eagle3Head, Eagle3Params
from specjax.device.drafters.head import HeadDrafter, on_rows
from specjax.device.loading import Log
from specjax.device.models.config_fields import refuse_quantised
from specjax.device.models.decoder import DecoderLayer, decoder_layer
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.rows import Rows
from specjax.device.models.model import Features, Model
from specjax.device.models.registry import read_config
from specjax.device.placement import Placement
from specjax.device.verification import Draft

# Names of the field with the mask's token id, in configs of speculators and AWS.
MASK_KEYS = "mask_token_id", "pard_token", "ptd_token_id"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PEagleParams(Eagle3Params):
    """Weights of a P-EAGLE head: the fields of an EAGLE-3 head, and the layers after the first."""

    layers: tuple[DecoderLayer, ...]  # after the first
    mask_states: jax.Array  # [1, 1, A D_target], `mask_hidden`


@dataclass(frozen=True, kw_only=True)
class PEagleHead(Eagle3Head):
    """The P-EAGLE head. `shape` is a decoder with the head's number of layers."""

    mask_token_id: int
    recycle_normed: bool = True  # `extend` returns normed states

    def specs(self, names: Collection[str] = ()) -> PEagleParams:
        """Return the weights as `TensorSpec`s; see `Eagle3Head.specs`."""
        width = self.feature_size
        return PEagleParams(
            **vars(super().specs(names)),
            layers=tuple(
                self.shape.layer_specs(f"layers.{i}") for i in range(1, self.shape.num_layers)
            ),
            mask_states=stored(["mask_hidden"], (1, 1, width)),
        )

    def extend(
        self,
        target: Model,
        params: Params,
        tokens: jax.Array,
        hidden: jax.Array,
        rows: Rows,
        kv: Any,
    ) -> tuple[jax.Array, Any]:
        """Run all layers on `tokens` i32[N] and `hidden` [N, D] (g in the module's docstring).

        Return the normed output [N, D] and the new kv.
        """
        own, shape = params.drafter, self.shape
        embedded = embed_tokens(target, params, tokens)
        stream, kv = eagle3.first_layer(own, embedded, hidden, rows, kv, self)
        angles = shape.rope.angles(rows.positions)
        for i, layer in enumerate(own.layers, start=1):
            where = rows, angles, kv, jnp.int32(i), shape, shape.attention
            stream, kv = decoder_layer(layer, stream, *where)
        return stream.normed(own.norm, shape, rows.kernels)[1], kv

    def mask_rows(self, params: PEagleParams, num_rows: int) -> tuple[jax.Array, jax.Array]:
        """Return the tokens i32[N] and the hidden states [N, D] of N = `num_rows` mask rows."""
        states = params.mask_states.reshape(1, -1)
        fused = self.fuse(params, Features(states, states))
        tokens = jnp.full(num_rows, self.mask_token_id, jnp.int32)
        return tokens, jnp.broadcast_to(fused, (num_rows, self.hidden_size))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PEagleState:
    """The head's KV cache, and the output from which each request's first draft is drawn."""

    kv: Pages  # [layers, pages, page_size, 2, H_kv, D]
    hidden: jax.Array  # [S, D], normed, at the last accepted row


@dataclass(frozen=True)
class PEagleDrafter(HeadDrafter[PEagleHead]):
    """A drafter that runs the head on mask rows once per round."""

    def draft_slots(self, k: int) -> int:
        """Return k - 1: one row for every draft after the first."""
        return max(k - 1, 0)

    def init_state(self, sizes: CacheSizes, dtype: Any) -> PEagleState:
        """Return a state with an empty cache."""
        hidden = jnp.zeros((sizes.num_slots, self.head.hidden_size), dtype)
        return PEagleState(self.head.cache_kind.init(sizes, dtype), hidden)

    def draft(
        self, target: Model, params: Params, state: PEagleState, context: DraftContext, k: int
    ) -> tuple[Draft, PEagleState]:
        """See `Drafter.draft`."""
        batch, kv = context.starts.shape[0], state.kv
        if not k:
            return Draft.stacked([], [], batch), state
        hidden = state.hidden.at[context.slots].get(mode="fill", fill_value=0)[:, None]
        if k > 1:
            rows = CachedRows.starting_at(
                context.starts,
                jnp.where(context.is_active, k - 1, 0),
                padded_width(batch, k - 1, context.row_multiple),
                context.page_table,
                kernels=context.kernels,
            )
            tokens, masks = self.head.mask_rows(params.drafter, len(rows.positions))
            masks, kv = self.head.extend(target, params, tokens, masks, rows, kv)
            hidden = jnp.concatenate([hidden, rows.by_request(masks)[:, : k - 1]], axis=1)
        logits = on_rows(
            lambda x: self.head.logits(target, params, x),
            hidden.reshape(batch * k, -1),
            context.row_multiple,
        ).reshape(batch, k, -1)
        return self.draw_together(target, params, context, logits), PEagleState(kv, state.hidden)

    def observe(
        self, target: Model, params: Params, state: PEagleState, seen: Observation
    ) -> PEagleState:
        """See `Drafter.observe`."""
        fused, following = self.head.fuse(params.drafter, seen.features), seen.following
        hidden, kv = self.head.extend(
            target, params, following.reshape(-1), fused, seen.rows, state.kv
        )
        last = seen.rows.by_request(hidden)[jnp.arange(len(following)), seen.last]
        return PEagleState(kv, state.hidden.at[seen.slots].set(last, mode="drop"))


def load(
    folder: Path | None,
    config: SpeculativeConfig,
    target: Model,
    dtype: np.dtype,
    placement: Placement,
    log: Log,
) -> tuple[PEagleDrafter, PEagleParams]:
    """Load a head in the layout of EAGLE-3 (AWS) or of the library speculators ("peagle").

    Raises:
        CheckpointError: the head was made for another target, or is another kind of head.
    """
    assert folder is not None, config.method
    hf = read_config(folder)
    refuse_quantised(hf)
    files = DrafterFiles(open_checkpoint(folder), hf, placement, log)
    if not files.has("mask_hidden"):
        raise CheckpointError(
            f"{files.tensors.folder} has no tensor mask_hidden, which P-EAGLE needs; use method "
            "'eagle3' if it is an EAGLE-3 head"
        )
    head = _read_head(files, config, target)
    params = eagle3.load_weights(files, head, target, dtype)
    return PEagleDrafter(head, is_greedy=config.draft_sample_method == "greedy"), params


def from_config(folder: Path, config: SpeculativeConfig, target: Model) -> PEagleDrafter:
    """Return a drafter with the sizes in `folder`'s config. The folder needs no weights.

    Raises:
        CheckpointError: the drafter was made for another target, or has a separate draft
            vocabulary.
    """
    files = DrafterFiles.without_weights(folder)
    head = _read_head(files, config, target)
    read_target_ids(files, head.draft_vocab_size, target)
    return PEagleDrafter(head)


def _read_head(files: DrafterFiles, config: SpeculativeConfig, target: Model) -> PEagleHead:
    layer = eagle3.layer_name(files.tensors.names())
    body = eagle3.read_head(files, config, target, files.geometry(layer, target, is_deep=True))
    return PEagleHead(
        **vars(body)
        | {
            "norm_before_residual": files.hf.flag("norm_before_residual"),
            "recycle_normed": True,
            "mask_token_id": _read_mask(files.hf, target),
        }
    )


def _read_mask(hf: HFConfig, target: Model) -> int:
    given = [key for key in MASK_KEYS if hf.get(key, None) is not None]
    token = hf.get(given[0], None) if given else None
    if type(token) is not int or not 0 <= token < target.vocab_size:
        raise CheckpointError(
            f"{hf.origin}: {given[0] if given else MASK_KEYS[0]}={token!r} must be one of the "
            f"target's {target.vocab_size} tokens; set it to the mask token of training"
        )
    return token


def to_hf(head: PEagleHead) -> dict[str, Any]:
    """Return a head's `config.json` in the authors' format."""
    own = {"parallel_drafting": True, "ptd_token_id": head.mask_token_id}
    return {**eagle3.to_hf(head), **own}
