"""DSpark (2026): a DFlash block whose drafts are corrected one after the other.

    rows      as in DFlash, but row 0 already gives a draft. So K drafts need K rows, not K + 1
    drafts    drawn from logits_j + W_2 W_1[previous token]. logits_j are DFlash's logits of row j.
              W_1 [V, r] and W_2 [V, r] are weights of a small rank r

A confidence head in the checkpoint is not loaded, because the engine chooses K from the acceptance
that it measures.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.spec import stored
from specjax.device.drafters.dflash import Refinement
from specjax.device.models.hf_config import HFConfig
from specjax.device.weights.matrix import Matrix, dense
from specjax.device.weights.table import Table


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MarkovParams:
    """Weights that correct a draft's logits, depending on the previous token."""

    previous: Table  # [V, r]
    bias: Matrix  # [r, V_d]


@dataclass(frozen=True, kw_only=True)
class Markov(Refinement):
    """A correction of draft logits by a matrix of low rank; see `Refinement`."""

    rank: int
    is_serial: ClassVar[bool] = True

    def specs(self, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> MarkovParams:
        """See `Refinement.specs`."""
        names = [f"markov_head.markov_{which}.weight" for which in ("w1", "w2")]
        return MarkovParams(
            previous=Table(stored([names[0]], (vocab_size, self.rank))),
            bias=dense([names[1]], self.rank, [draft_vocab_size]),
        )

    def logits(self, params: MarkovParams, block: jax.Array, previous: jax.Array) -> jax.Array:
        """See `Refinement.logits`."""
        return block + params.bias.multiply(params.previous.rows(previous), jnp.float32)


def read(hf: HFConfig, own: dict[str, Any]) -> tuple[Refinement, int]:
    """Return a config's refinement, and the index of the first row that gives a draft.

    The refinement is a `Markov`, or a plain `Refinement` if the config describes no correction of
    logits. The index counts the rows of a block. `own` is the config's field `dflash_config`.

    Raises:
        CheckpointError: the correction is not of kind "vanilla".
    """
    kind = hf.get("markov_head_type", own.get("markov_head_type", "vanilla"))
    if kind != "vanilla":
        raise CheckpointError(
            f"{hf.origin}: markov_head_type={kind!r} is not supported; use a head with 'vanilla'"
        )
    rank = hf.get("markov_rank", own.get("markov_rank", 0))
    is_exported = "speculators_model_type" in hf.fields  # exports may have DFlash's rows
    from_anchor = hf.get("sample_from_anchor", own.get("sample_from_anchor", not is_exported))
    return Markov(rank=rank) if rank else Refinement(), 0 if from_anchor else 1


def to_hf(rank: int) -> dict[str, Any]:
    """Return the fields that a DSpark head's `config.json` adds to DFlash's."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "markov_head_type": "vanilla",
        "markov_rank": rank,
        "enable_confidence_head": False,
        "sample_from_anchor": True,
    }
