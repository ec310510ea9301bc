"""The models of tests of whole engines: one config of each kind, so that programs are shared.

A program depends on a model's config, the engine's sizes and what its steps do, not on weights. So
these tests differ in data alone, and steps that do more than one thing do everything.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from support.checkpoints import Checkpoints
from support.params import random_params
from support.weights import HeadFiles, TargetFiles, rewrite

from specjax import LLM, SamplingParams
from specjax.checkpoint.save import save_checkpoint
from specjax.device.drafters import dflash2
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.registry import load_model
from specjax.train.drafter import KINDS, HeadSizes

VOCAB = 96  # printable ASCII and an end, as `Checkpoints.with_letters` has them
EOS = VOCAB - 1
NUM_LIKELY = 8
NUM_SNAPSHOTS = 2  # of hybrids' states
MOST_DRAFTS = 7  # of heads that draft all tokens of a round at once


def llama(checkpoints: Checkpoints, *, seed: int = 0) -> TargetFiles:
    """Two layers of attention."""
    return checkpoints.target("llama", seed=seed, vocab_size=VOCAB, eos_token_id=EOS)


def eagle3(checkpoints: Checkpoints) -> HeadFiles:
    """A head for `llama`, of fewer tokens than it has."""
    return checkpoints.eagle3(llama(checkpoints), draft_vocab=40)


def hybrid(checkpoints: Checkpoints) -> Path:
    """A layer with a recurrent state and one of attention, and a module that drafts."""
    target = checkpoints.target("qwen3_5_text", vocab_size=VOCAB, eos_token_id=EOS)
    return checkpoints.mtp(target).folder


def parallel_head(checkpoints: Checkpoints, method: str) -> Path:
    """A head for `llama` that drafts all tokens of a round at once, at most seven."""
    target = llama(checkpoints)
    if method == "p_eagle":
        return checkpoints.p_eagle(target, num_layers=2, mask_token_id=EOS).folder
    model, _ = load_model(target.folder, np.dtype("float32"))
    sizes = HeadSizes(
        aux_layers=(0, 1), mask_token_id=EOS, num_layers=1, num_heads=MOST_DRAFTS, block_size=8
    )
    made = KINDS["dflash" if method == "dflash2" else method].make(model, sizes, [])
    head, config = made.head, made.config
    if method == "dflash2":
        own = config["dflash_config"] | {"conv_group_size": 8, "selector_rank": 4}
        config = config | {"architectures": ["DFlash2DraftModel"], "dflash_config": own}
        refinement, _ = dflash2.read(HFConfig(config, "a test's"), own)
        head = replace(head, refinement=refinement)
    folder, specs = checkpoints.copy(target.folder) / method, head.specs()
    save_checkpoint(folder, specs, random_params(specs, 1), config, dtype=jnp.float32)
    return folder


def other_letters(checkpoints: Checkpoints) -> Path:
    """A model of few words, like `llama`, with fewer letters, in the opposite order."""
    size = VOCAB - 16
    folder = checkpoints.target("llama", seed=1, vocab_size=size, eos_token_id=0).folder
    ids = range(size - 1, -1, -1)
    return checkpoints.with_letters(of_few_words(checkpoints, folder, ids), ids)


def without_end(checkpoints: Checkpoints, folder: Path) -> Path:
    """A copy of a target without an end of sequence: outputs are as long as they may be."""
    made = checkpoints.copy(folder, eos_token_id=None)
    (made / "generation_config.json").unlink(missing_ok=True)
    return made


def of_few_words(checkpoints: Checkpoints, folder: Path, ids: Sequence[int] = range(VOCAB)) -> Path:
    """A copy of a target or head that says next to nothing but eight tokens of the head's, of which
    it has `ids`, by token of `llama`.

    An untrained drafter is right one time in eight then, and not one in a hundred.
    """
    import torch

    offsets = eagle3(checkpoints).tensors["d2t"]
    kept = torch.arange(len(offsets)) + offsets
    likely = kept[:: len(kept) // NUM_LIKELY][:NUM_LIKELY]

    def skew(tensors: dict[str, Any]) -> dict[str, Any]:
        head = tensors["lm_head.weight"]
        said = torch.tensor([ids[token] for token in likely if token < len(ids)])
        own = kept if len(head) == len(kept) else torch.arange(len(head))
        scales = torch.where(torch.isin(own, said), 1.0, 0.1)
        return tensors | {"lm_head.weight": head * scales[:, None]}

    made = checkpoints.copy(folder)
    rewrite(made / "model.safetensors", skew)
    return made


def prepare_everything(llm: LLM) -> None:
    """Compile steps that do whatever requests ask for but processors, with masks and without.

    Requests that ask for nothing still run in steps that do nothing more.
    """
    everything = {"presence_penalty": 1.0, "logprobs": 1, "prompt_logprobs": 1}
    kinds = everything, everything | {"structured_outputs": {"regex": "a"}}
    params = [SamplingParams(**kind) for kind in kinds]
    make = llm.request_maker.make
    llm.engine.prepare([make([1], one, i, "a prompt") for i, one in enumerate(params)])
