"""Engines whose pages hold 8-bit numbers: speculation, preemption and prefixes change no token."""

from typing import Any, NamedTuple

import jax
import pytest
import torch
from support.engines import SIZES, K
from support.real_schedules import Found, run_real_schedule
from support.shared_models import NUM_SNAPSHOTS, VOCAB, eagle3, hybrid, llama, of_few_words
from support.weights import rewrite

from pallas_kernels.page_formats import PAGE_FORMATS
from specjax.rl import RolloutEngine

ODD = ["sliding_window", 1]


class Case(NamedTuple):
    """A model and its drafter, and the options for their pages."""

    kind: str
    method: str
    dtype: str
    options: dict[str, Any] = {}
    drafters: str | None = None  # dtype of the drafter's pages, if another
    sizes: dict[str, Any] = {}  # of the model


CASES = {
    "llama": Case("llama", "eagle3", "fp8"),
    "hybrid": Case("hybrid", "mtp", "int8"),
    "latents": Case("glm4_moe_lite", "mtp", "int8", drafters="fp8"),
    # A rank with which chunks take the plain form, at least in wider models.
    "latents in fp8": Case("deepseek_v3", "mtp", "fp8", {"kv_cache_dtype_skip_layers": [1]}),
    "windows": Case(
        "gpt_oss",
        "ngram",
        "int8",
        {"kv_cache_dtype_skip_layers": ODD},
        sizes={"num_hidden_layers": 3, "sliding_window": 7},
    ),
}


def made(checkpoints, case):
    """A folder that says few words, and the fields of its `speculative_config`."""
    config = {"method": case.method, "num_speculative_tokens": K}
    if case.drafters:
        config["kv_cache_dtype"] = case.drafters
    if case.kind == "hybrid":
        return of_few_words(checkpoints, hybrid(checkpoints)), config
    if case.kind == "llama":
        head = of_few_words(checkpoints, eagle3(checkpoints).folder)
        return of_few_words(checkpoints, llama(checkpoints).folder), {**config, "model": str(head)}
    target = checkpoints.target(case.kind, vocab_size=VOCAB, eos_token_id=VOCAB - 1, **case.sizes)
    folder = checkpoints.mtp(target, layout="single").folder if case.method == "mtp" else None
    return of_few_words(checkpoints, folder or target.folder), config


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "llama")) for n in CASES]
)
def test_random_schedules(checkpoints, name):
    """Requests join, leave, share prefixes and are preempted, with drafts and async steps."""
    case, found = CASES[name], Found()
    folder, config = made(checkpoints, case)
    folder = checkpoints.with_letters(folder)
    if case.dtype == "fp8":  # in which such small numbers are 0 otherwise
        scales = {
            f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(2.0**-11)
            for x in "kv"
            for i in range(2)
        }
        rewrite(folder / "model.safetensors", lambda tensors: tensors | scales)
    options = {"kv_cache_dtype": case.dtype, **case.options, **SIZES}
    options["num_snapshots"] = NUM_SNAPSHOTS
    with (
        RolloutEngine(folder, speculative_config=config, **options) as ours,
        RolloutEngine(folder, enable_prefix_caching=False, **options) as plain,
    ):
        check_bytes(ours._llm, case)
        for seed in range(3):
            found += run_real_schedule(ours._llm, plain._llm, seed)
    assert not found.identity.mismatches
    assert all(found.tally[one] > 0 for one in ("preemptions", "prefix hits", "accepted"))


def check_bytes(llm, case):
    """The pools have their dtypes, and as many bytes as was planned."""
    state, kinds = llm.engine.programs.state, llm.target.cache_kinds
    stored = PAGE_FORMATS[case.dtype].dtype
    for kind, pages in zip(kinds, state.caches, strict=True):
        if not kind.is_recurrent:
            assert pages.values.dtype == ("float32" if kind.keeps_dtype else stored)
    leaves = jax.tree.leaves(state.drafter)
    own = PAGE_FORMATS[case.drafters or case.dtype].dtype
    assert case.method == "ngram" or own in {str(x.dtype) for x in leaves}
