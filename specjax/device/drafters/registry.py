"""Drafters by the `method` that asks for them: the only place that switches on the name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint
from specjax.config import SpeculativeConfig
from specjax.device.drafters import eagle, eagle3, mtp
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.checkpoint import DrafterFiles
from specjax.device.drafters.drafter import Drafter
from specjax.device.drafters.ngram import NGramDrafter
from specjax.device.models.config_fields import refuse_quantised
from specjax.device.models.model import Model
from specjax.device.models.registry import read_config

HEADS: dict[str, Callable[[DrafterFiles, SpeculativeConfig, Model, np.dtype], tuple[Any, Any]]] = {
    "eagle": eagle.load,
    "eagle3": eagle3.load,
    "mtp": mtp.load,
}


def load_drafter(
    folder: Path | None, config: SpeculativeConfig, target: Model, dtype: np.dtype
) -> tuple[Drafter, Any]:
    """The drafter that a config names and its parameters, checked against the target.

    `folder` is its checkpoint; None for a method without one.

    Raises:
        CheckpointError: the files are damaged, or made for another target.
    """
    if folder is None:
        assert config.method == "ngram", config.method
        return NGramDrafter(config.prompt_lookup_min, config.prompt_lookup_max), None  # pyright: ignore[reportArgumentType]
    hf = read_config(folder)
    refuse_quantised(hf)
    files = DrafterFiles(open_checkpoint(folder), hf)
    head, params = HEADS[config.method](files, config, target, dtype)
    if not head.has_embedding and head.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{folder}: the drafter is {head.hidden_size} wide and has no embedding of its own, "
            f"the target is {target.hidden_size} wide; use a drafter trained for this target"
        )
    return ChainDrafter(head, is_greedy=config.draft_sample_method == "greedy"), params


def share_embedding(
    drafter: ChainDrafter, params: Any, target: Model, target_params: Any
) -> tuple[ChainDrafter, Any]:
    """The drafter without its embedding, if that is a copy of the target's."""
    if not drafter.head.has_embedding:
        return drafter, params
    shared = target.embed(target_params, jnp.arange(target.vocab_size))
    if shared.shape != params.embedding.shape or not bool((shared == params.embedding).all()):
        return drafter, params
    head: Any = drafter.head
    head = replace(head, has_embedding=False)
    return replace(drafter, head=head), replace(params, embedding=None)
