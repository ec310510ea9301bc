"""Medusa (Cai et al. 2024): a small head for every draft token, all on one state of the target.

    x <- x + silu(L_ij x) for the blocks j of head i, from x = f_p      logits_i = W_i x

f_p is the target's hidden state after its final norm at the last accepted row p. Head i predicts
the token i + 2 places on, as the target itself predicts the next one. So a draft does not know of
the drafts before it, and nothing is kept but f_p.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint, open_file
from specjax.checkpoint.spec import projection, stored
from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.drafters.drafter import DraftContext, Observation, Params
from specjax.device.loading import load_params
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.linear import linear
from specjax.device.models.model import Model
from specjax.device.models.registry import read_config
from specjax.device.placement import Placement
from specjax.device.verification import Draft

FIRST_FILES = "medusa_lm_head.safetensors", "medusa_lm_head.pt"  # of the authors' releases
TOKEN_MAP = "token_map"  # the target's token id of each draft logit, in vLLM's layout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResidualBlock:
    """A residual block."""

    weight: jax.Array  # [D, D]
    bias: jax.Array | None  # [D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MedusaParams:
    """Weights of all heads."""

    blocks: tuple[tuple[ResidualBlock, ...], ...]  # by head
    lm_heads: tuple[jax.Array, ...]  # [D, V_d]
    target_ids: jax.Array | None  # i32[V_d]


@dataclass(frozen=True, kw_only=True)
class MedusaHeads:
    """The heads' sizes, and their weights' names in either published layout."""

    num_heads: int
    num_blocks: int
    hidden_size: int
    draft_vocab_size: int
    has_bias: bool
    prefix_in_target: None = None

    def specs(self, names: Collection[str] = ()) -> MedusaParams:
        """Return the weights as `TensorSpec`s: vLLM's names, or the authors' if `names` has them.

        `target_ids` is None: it is no weight.
        """
        is_first, dim = f"0.{self.num_blocks}.weight" in names, self.hidden_size

        def block(i: int, j: int) -> ResidualBlock:
            stem = f"{i}.{j}.linear" if is_first else f"blocks.{i}.layers.{j}"
            bias = stored([f"{stem}.bias"], (dim,)) if self.has_bias else None
            return ResidualBlock(projection([f"{stem}.weight"], dim, [dim]), bias)

        heads = [
            f"{i}.{self.num_blocks}.weight" if is_first else f"lm_heads.{i}.weight"
            for i in range(self.num_heads)
        ]
        return MedusaParams(
            tuple(
                tuple(block(i, j) for j in range(self.num_blocks)) for i in range(self.num_heads)
            ),
            tuple(projection([name], dim, [self.draft_vocab_size]) for name in heads),
            None,
        )

    def is_unused(self, name: str) -> bool:
        """See `DrafterWeights.is_unused`."""
        return name == TOKEN_MAP

    def target_ids(self, params: MedusaParams) -> jax.Array | None:
        """Return the target's ids of the draft vocabulary."""
        return params.target_ids

    def logits(self, params: MedusaParams, hidden: jax.Array, i: int) -> jax.Array:
        """Return the logits f32[B, V_d] of head i for hidden states [B, D]."""
        for block in params.blocks[i]:
            y = linear(hidden, block.weight)
            hidden = hidden + jax.nn.silu(y if block.bias is None else y + block.bias)
        return linear(hidden, params.lm_heads[i], jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MedusaState:
    """What the next drafts start from."""

    hidden: jax.Array  # [S, D], the target's at the last accepted row


@dataclass(frozen=True)
class MedusaDrafter:
    """A drafter by `heads`."""

    heads: MedusaHeads
    is_greedy: bool = False  # draft the argmax at any temperature

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Empty: the heads read the last hidden state."""
        return ()

    @property
    def weights(self) -> MedusaHeads:
        """The heads, which describe their weights."""
        return self.heads

    def draft_slots(self, k: int) -> int:
        """Return 0: drafting runs no rows of its own."""
        return 0

    def num_passes(self, k: int) -> int:
        """Return 1, if there are drafts: every head is read once."""
        return min(k, 1)

    def init_state(self, sizes: CacheSizes, dtype: Any) -> MedusaState:
        """Return hidden states of zeros."""
        return MedusaState(jnp.zeros((sizes.num_slots, self.heads.hidden_size), dtype))

    def share(self, params: Any, target: Model, target_params: Any) -> tuple["MedusaDrafter", Any]:
        """Return the drafter unchanged: it has copies of nothing."""
        return self, params

    def draft(
        self, target: Model, params: Params, state: MedusaState, context: DraftContext, k: int
    ) -> tuple[Draft, MedusaState]:
        """See `Drafter.draft`."""
        batch, own = context.slots.shape[0], params.drafter
        hidden = state.hidden.at[context.slots].get(mode="fill", fill_value=0)
        hidden = jnp.pad(hidden, ((0, -batch % context.row_multiple), (0, 0)))
        drafts: list[jax.Array] = []
        probs: list[jax.Array] = []
        for i in range(k):
            logits, ids = self.heads.logits(own, hidden, i)[:batch], own.target_ids
            token, q = context.draw(
                logits, ids, target.vocab_size, drafts, is_greedy=self.is_greedy
            )
            drafts.append(token)
            probs += [] if q is None else [q]
        return Draft.stacked(drafts, probs, batch), state

    def observe(
        self, target: Model, params: Params, state: MedusaState, seen: Observation
    ) -> MedusaState:
        """See `Drafter.observe`: keep the hidden state of the last accepted row."""
        batch = len(seen.following)
        hidden = seen.features.hidden.reshape(batch, -1, self.heads.hidden_size)
        last = hidden[jnp.arange(batch), seen.last]
        return MedusaState(state.hidden.at[seen.slots].set(last, mode="drop"))


def load(
    folder: Path | None,
    config: SpeculativeConfig,
    target: Model,
    dtype: np.dtype,
    placement: Placement,
) -> tuple[MedusaDrafter, MedusaParams]:
    """Load heads in vLLM's layout, or in the authors' (`medusa_lm_head`).

    Raises:
        CheckpointError: they were made for another target, or are fewer than the drafts asked for.
    """
    assert folder is not None, config.method
    hf = read_config(folder)
    first = [folder / name for name in FIRST_FILES if (folder / name).exists()]
    files = open_file(first[0]) if first else open_checkpoint(folder)
    names = files.names()
    num_heads = hf.integer("num_heads", hf.integer("medusa_num_heads", 5))
    if config.num_speculative_tokens > num_heads:
        raise CheckpointError(
            f"{hf.origin}: {num_heads} heads draft as many tokens; lower "
            f"speculative_config.num_speculative_tokens={config.num_speculative_tokens}"
        )
    vocab_size = hf.integer("truncated_vocab_size", target.vocab_size)
    heads = MedusaHeads(
        num_heads=num_heads,
        num_blocks=hf.integer("num_hidden_layers", hf.integer("medusa_num_layers", 1)),
        hidden_size=target.hidden_size,
        draft_vocab_size=vocab_size,
        has_bias=any(name.endswith(".bias") for name in names),
    )
    ids = _read_token_map(files, hf, heads, target)
    params = load_params(
        files, heads.specs(names), dtype, placement=placement, ignore=heads.is_unused
    )
    if ids is not None:
        params = MedusaParams(params.blocks, params.lm_heads, placement.put(ids))
    return MedusaDrafter(heads, is_greedy=config.draft_sample_method == "greedy"), params


def _read_token_map(
    files: Any, hf: HFConfig, heads: MedusaHeads, target: Model
) -> np.ndarray | None:
    """Return the target's ids i32[V_d] of the draft vocabulary; None if it is the target's."""
    if TOKEN_MAP not in files.names():
        if heads.draft_vocab_size != target.vocab_size:
            raise CheckpointError(
                f"{hf.origin}: truncated_vocab_size={heads.draft_vocab_size} differs from the "
                f"target's {target.vocab_size}, but the weights have no {TOKEN_MAP}"
            )
        return None
    ids = files.read(TOKEN_MAP)
    fits = ids.shape == (heads.draft_vocab_size,) and ids.dtype.kind in "iu"
    if not fits or ids.min() < 0 or ids.max() >= target.vocab_size:
        raise CheckpointError(
            f"{hf.origin}: {TOKEN_MAP} must be {heads.draft_vocab_size} ids of the target's "
            f"{target.vocab_size} tokens, got {ids.dtype}{list(ids.shape)}"
        )
    return ids.astype(np.int32)
