"""The models for tests of whole engines, with one config per kind of model.

A compiled program depends on the model's config, the engine's sizes and the options that its steps
support, not on weights. So tests that share these share programs.
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
    """Return a target with two layers of attention."""
    return checkpoints.target("llama", seed=seed, vocab_size=VOCAB, eos_token_id=EOS)


def eagle3(checkpoints: Checkpoints) -> HeadFiles:
    """Return an EAGLE-3 head for `llama` with a smaller draft vocabulary."""
    return checkpoints.eagle3(llama(checkpoints), draft_vocab=40)


def hybrid(checkpoints: Checkpoints, *, seed: int = 0) -> Path:
    """Return a target with a recurrent layer, an attention layer and an MTP module."""
    target = checkpoints.target("qwen3_5_text", seed=seed, vocab_size=VOCAB, eos_token_id=EOS)
    return checkpoints.mtp(target).folder


def parallel_head(checkpoints: Checkpoints, method: str) -> Path:
    """Return a head for `llama` that makes all drafts of a round in one pass, at most seven."""
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
    """Return a draft model with another vocabulary: fewer letters than `llama`'s, in reverse order.

    It mostly predicts a few tokens; see `of_few_words`.
    """
    size = VOCAB - 16
    folder = checkpoints.target("llama", seed=1, vocab_size=size, eos_token_id=0).folder
    ids = range(size - 1, -1, -1)
    return checkpoints.with_letters(of_few_words(checkpoints, folder, ids), ids)


def without_end(checkpoints: Checkpoints, folder: Path) -> Path:
    """Return a copy of a target without end of sequence, so that outputs have full length."""
    made = checkpoints.copy(folder, eos_token_id=None)
    (made / "generation_config.json").unlink(missing_ok=True)
    return made


def of_few_words(checkpoints: Checkpoints, folder: Path, ids: Sequence[int] = range(VOCAB)) -> Path:
    """Return a copy of a target or head that mostly predicts eight tokens of the EAGLE-3 head.

    So about one in eight drafts of an untrained drafter is right, instead of one in a hundred.
    `ids` has the copy's token id for each token of `llama`.
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
    """Compile steps that support all request options except logits processors.

    Steps are compiled with grammar masks and without them. Requests without options still run in
    plain steps.
    """
    everything = {"presence_penalty": 1.0, "logprobs": 1, "prompt_logprobs": 1}
    kinds = everything, everything | {"structured_outputs": {"regex": "a"}}
    params = [SamplingParams(**kind) for kind in kinds]
    make = llm.request_maker.make
    llm.engine.prepare([make([1], one, i, "a prompt") for i, one in enumerate(params)])
