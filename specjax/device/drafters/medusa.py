"""Medusa (Cai et al. 2024): one small head per draft token. All heads read one hidden state.

Head i starts with x = f_p, and has blocks j and an output matrix:

    x <- x + silu(L_ij x)    for each block j
    logits_i = W_i x

f_p is the target's hidden state after its final norm at the last accepted row p. Head i predicts
the token at p + i + 2; the target itself predicts the token at p + 1. So a draft does not depend on
the drafts before it, and the only state is f_p.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.division import Share
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint, open_file
from specjax.checkpoint.spec import stored
from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.drafters.checkpoint import DrafterFiles, read_target_ids
from specjax.device.drafters.drafter import DraftContext, Observation, Params
from specjax.device.drafters.head import HeadDrafter, on_rows
from specjax.device.loading import Log
from specjax.device.models.model import Model
from specjax.device.models.registry import read_config
from specjax.device.parallel import specs_of
from specjax.device.placement import Placement
from specjax.device.verification import Draft
from specjax.device.weights.matrix import Matrix, dense

FIRST_FILES = "medusa_lm_head.safetensors", "medusa_lm_head.pt"  # in the authors' releases
TOKEN_MAP = "token_map"  # the tensor in vLLM's layout with the target's id of each draft token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResidualBlock:
    """Weights of a residual block."""

    weight: Matrix  # [D, D]
    bias: jax.Array | None  # [D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MedusaParams:
    """Weights of all heads."""

    blocks: tuple[tuple[ResidualBlock, ...], ...]  # by head
    lm_heads: tuple[Matrix, ...]  # [D, V_d]
    target_ids: jax.Array | None  # i32[V_d]


@dataclass(frozen=True, kw_only=True)
class MedusaHeads:
    """The heads' sizes, and the names of the heads' weights in the authors' or vLLM's layout."""

    num_heads: int
    num_blocks: int
    hidden_size: int
    draft_vocab_size: int
    has_bias: bool
    has_embedding: bool = False
    aux_layers: tuple[int, ...] = ()
    prefix_in_target: None = None

    def specs(self, names: Collection[str] = ()) -> MedusaParams:
        """Return the weights as `TensorSpec`s.

        `names` are the tensor names in the files. The `TensorSpec`s have the authors' names if the
        files have them, else vLLM's names. The field `target_ids` is None, because `load` reads
        the token ids separately.
        """
        is_first, dim = f"0.{self.num_blocks}.weight" in names, self.hidden_size

        def block(i: int, j: int) -> ResidualBlock:
            stem = f"{i}.{j}.linear" if is_first else f"blocks.{i}.layers.{j}"
            bias = stored([f"{stem}.bias"], (dim,)) if self.has_bias else None
            return ResidualBlock(dense([f"{stem}.weight"], dim, [dim]), bias)

        heads = [
            f"{i}.{self.num_blocks}.weight" if is_first else f"lm_heads.{i}.weight"
            for i in range(self.num_heads)
        ]
        return MedusaParams(
            tuple(
                tuple(block(i, j) for j in range(self.num_blocks)) for i in range(self.num_heads)
            ),
            tuple(dense([name], dim, [self.draft_vocab_size]) for name in heads),
            None,
        )

    @property
    def num_devices(self) -> int:
        """1: every device has all heads, which are small."""
        return 1

    @property
    def shares(self) -> Mapping[str, Share]:
        """Empty: no weight is divided over devices."""
        return {}

    @property
    def local(self) -> Self:
        """These heads, because no weight is divided over devices."""
        return self

    def is_unused(self, name: str) -> bool:
        """See `DrafterWeights.is_unused`."""
        return name == TOKEN_MAP

    def target_ids(self, params: MedusaParams) -> jax.Array | None:
        """Return the target's id of each draft token, i32[V_d]; None if the ids are the same."""
        return params.target_ids

    def logits(self, params: MedusaParams, k: int, hidden: jax.Array) -> jax.Array:
        """Return the logits f32[B, k, V_d] of the first k heads for hidden states [B, D]."""
        return jnp.stack([self.logits_of(params, i, hidden) for i in range(k)], axis=1)

    def logits_of(self, params: MedusaParams, i: int, hidden: jax.Array) -> jax.Array:
        """Return the logits f32[B, V_d] of head i for hidden states [B, D]."""
        x = hidden
        for block in params.blocks[i]:
            y = block.weight.multiply(x)
            x = x + jax.nn.silu(y if block.bias is None else y + block.bias[None])
        return params.lm_heads[i].multiply(x, jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MedusaState:
    """The hidden state from which the next drafts are made, for each running request."""

    hidden: jax.Array  # [S, D], the target's hidden state at the last accepted row


@dataclass(frozen=True)
class MedusaDrafter(HeadDrafter[MedusaHeads]):
    """A drafter with independent heads."""

    @property
    def may_defer(self) -> bool:
        """False: `observe` reads no weights, so deferring it would save no time."""
        return False

    def init_state(self, sizes: CacheSizes, dtype: Any) -> MedusaState:
        """Return a state whose hidden states are zero."""
        return MedusaState(jnp.zeros((sizes.num_slots, self.head.hidden_size), dtype))

    def draft(
        self, target: Model, params: Params, state: MedusaState, context: DraftContext, k: int
    ) -> tuple[Draft, MedusaState]:
        """See `Drafter.draft`."""
        if not k:
            return Draft.stacked([], [], context.slots.shape[0]), state
        hidden = state.hidden.at[context.slots].get(mode="fill", fill_value=0)

        # One head at a time: stacking the logits of all heads would copy them.
        def logits_of(i: int, drafts: Sequence[jax.Array]) -> jax.Array:
            head = partial(self.head.logits_of, params.drafter, i)
            logits = on_rows(head, hidden, context.row_multiple)
            return (
                logits if params.drafter.target_ids is not None else target.vocabulary.part(logits)
            )

        return self.draw_each(target, params, context, k, logits_of), state

    def observe(
        self, target: Model, params: Params, state: MedusaState, seen: Observation
    ) -> MedusaState:
        """Keep the hidden state of the last accepted row; see `Drafter.observe`."""
        batch = len(seen.following)
        hidden = seen.features.hidden.reshape(batch, -1, self.head.hidden_size)
        last = hidden[jnp.arange(batch), seen.last]
        return MedusaState(state.hidden.at[seen.slots].set(last, mode="drop"))


def load(
    folder: Path | None,
    config: SpeculativeConfig,
    target: Model,
    dtype: np.dtype,
    placement: Placement,
    log: Log,
) -> tuple[MedusaDrafter, MedusaParams]:
    """Load heads in vLLM's layout or in the authors' layout (`medusa_lm_head`).

    Raises:
        CheckpointError: the heads were made for another target, or there are fewer heads than K.
    """
    assert folder is not None, config.method
    hf = read_config(folder)
    first = find_first_file(folder)
    tensors = open_checkpoint(folder) if first is None else open_file(first)
    files, names = DrafterFiles(tensors, hf, placement, log), tensors.names()
    heads = _read_heads(files, config, target)
    ids = read_target_ids(
        *(files, heads.draft_vocab_size, target, TOKEN_MAP),
        are_offsets=False,
        size="truncated_vocab_size",
    )
    params = replace(files.load(specs_of(heads, names), dtype, unused=(TOKEN_MAP,)), target_ids=ids)
    return MedusaDrafter(heads, is_greedy=config.draft_sample_method == "greedy"), params


def find_first_file(folder: Path) -> Path | None:
    """Return the path of a folder's file in the authors' layout; None if there is no such file."""
    paths = (folder / name for name in FIRST_FILES)
    return next((path for path in paths if path.exists()), None)


def from_config(folder: Path, config: SpeculativeConfig, target: Model) -> MedusaDrafter:
    """Return a drafter with the sizes in `folder`'s config. Its heads have no biases.

    No weights are read.

    Raises:
        CheckpointError: there are fewer heads than K.
    """
    return MedusaDrafter(_read_heads(DrafterFiles.without_weights(folder), config, target))


def _read_heads(files: DrafterFiles, config: SpeculativeConfig, target: Model) -> MedusaHeads:
    hf, k = files.hf, config.num_speculative_tokens
    num_heads = hf.integer("num_heads", hf.integer("medusa_num_heads", 5))
    if k > num_heads:
        raise CheckpointError(
            f"{hf.origin}: num_heads={num_heads} is the maximum number of draft tokens; lower "
            f"speculative_config.num_speculative_tokens={k}"
        )
    return MedusaHeads(
        num_heads=num_heads,
        num_blocks=hf.integer("num_hidden_layers", hf.integer("medusa_num_layers", 1)),
        hidden_size=target.hidden_size,
        draft_vocab_size=hf.integer("truncated_vocab_size", target.vocab_size),
        has_bias=any(name.endswith(".bias") for name in files.tensors.names()),
    )


def to_hf(heads: MedusaHeads) -> dict[str, Any]:
    """Return the heads' `config.json` in vLLM's layout."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": heads.hidden_size,
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_blocks,
        "truncated_vocab_size": heads.draft_vocab_size,
    }


def vocabulary_tensors(heads: MedusaHeads, params: MedusaParams) -> dict[str, np.ndarray]:
    """Return a dict with vLLM's tensor of the target's id of each draft token, i64[V_d].

    The dict is empty if the ids are the same.
    """
    ids = params.target_ids
    return {} if ids is None else {TOKEN_MAP: np.asarray(ids, np.int64)}
