"""With 8-bit pages, speculation, preemption and cached prefixes change no token."""

from typing import Any, NamedTuple

import jax
import pytest
import torch
from support.engines import (
    EXACT,
    SIZES,
    K,
    generate,
    generate_tokens,
    make_llm,
    random_prompts,
)
from support.marks import marked
from support.real_schedules import Found, run_real_schedule
from support.shared_models import NUM_SNAPSHOTS, VOCAB, eagle3, hybrid, llama, of_few_words
from support.weights import rewrite

from pallas_kernels.page_formats import PAGE_FORMATS
from specjax import SamplingParams
from specjax.device.models.model import page_windows
from specjax.host.speculation.policy import StaticPolicy
from specjax.rl import RolloutEngine
from specjax.serving.memory import target_cache_bytes


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
    "latents": Case("deepseek_v3", "mtp", "fp8", {"kv_cache_dtype_skip_layers": [1]}, "int8"),
    "windows": Case(
        "gpt_oss",
        "ngram",
        "int8",
        {"kv_cache_dtype_skip_layers": ["0"]},
        sizes={"num_hidden_layers": 3, "sliding_window": 7},
    ),
}


def made(checkpoints, case):
    """Return a folder of a model with few likely tokens, and its `speculative_config`."""
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


@pytest.mark.parametrize("name", marked(CASES, slow=["latents"]))
def test_random_schedules(checkpoints, name):
    """Requests join, leave, share prefixes and are preempted, with drafts and async steps."""
    case, found = CASES[name], Found()
    folder, config = made(checkpoints, case)
    folder = checkpoints.with_letters(folder)
    if case.dtype == "fp8":  # scales that are no powers of two
        scales = {
            f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(0.03)
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
        for seed in (4, 13, 15):  # with every rare event
            found += run_real_schedule(ours._llm, plain._llm, seed)
    assert not found.identity.mismatches
    assert all(found.tally[one] > 0 for one in ("preemptions", "prefix hits", "accepted"))


def check_bytes(llm, case):
    """Check the dtypes, scales and planned bytes of the pools."""
    engine = llm.engine
    config, state, target = engine.config, engine.programs.state, engine.target
    stored, own = config.page_format, config.draft_page_format
    asked = [PAGE_FORMATS[one].largest for one in (case.dtype, case.drafters or case.dtype)]
    assert [stored.largest, own.largest] == asked
    pages = dict(zip(target.cache_kinds, state.caches, strict=True))
    pages = {kind: one for kind, one in pages.items() if not kind.is_recurrent}
    kept = [kind.keeps_dtype for kind in pages]
    assert set(kept) == ({True, False} if case.options else {False})
    for kind, (values, scales) in pages.items():
        assert values.dtype == ("float32" if kind.keeps_dtype else stored.dtype)
        assert (scales is None) == kind.keeps_dtype
    dtypes = {str(x.dtype) for x in jax.tree.leaves(state.drafter)}
    assert case.method == "ngram" or own.dtype in dtypes
    sizes = config.page_size, K, config.dtype
    windows = page_windows(target, config)
    planned = target_cache_bytes(target, *sizes, windows, config.page_format).of_pages(config, K)
    arrays = [x for x in jax.tree.leaves([*pages.values()]) if x.ndim > 2]  # no scales of layers
    assert planned == sum(x.nbytes for x in arrays)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "latents"])
def test_on_two_devices_tokens_are_the_same(checkpoints, name):
    """Each device has the pages and scales of its heads. Each has all pages of latents."""
    case = CASES[name]
    folder, config = made(checkpoints, case)
    prompts = random_prompts(5, 33, 18, 1, vocab_size=VOCAB)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True)
        for i in range(len(prompts))
    ]
    found = []
    for count in 1, 2:
        options = {"kv_cache_dtype": "int8", "tensor_parallel_size": count}
        model = config.get("model")
        with make_llm(folder, case.method, model, **options) as llm:
            found.append(generate_tokens(llm, prompts, params))
            metrics = llm.metrics()
            found.append((metrics.num_draft_tokens, metrics.num_accepted_tokens))
    assert found[:2] == found[2:]


@pytest.mark.slow
def test_exact_engines_agree_bit_by_bit_also_after_sleep(checkpoints):
    folder, config = made(checkpoints, CASES["llama"])
    prompts = random_prompts(5, 33, 18, 1, vocab_size=VOCAB)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, logprobs=0) for i in range(4)]

    def results(llm):
        outputs = [one.outputs[0] for one in generate(llm, prompts, params)]
        return [
            (
                one.token_ids,
                [x[t].logprob for x, t in zip(one.logprobs, one.token_ids, strict=True)],
            )
            for one in outputs
        ]

    options = {"kv_cache_dtype": "int8", **EXACT}
    with make_llm(folder, "eagle3", config["model"], **options) as llm:
        llm.engine.set_policy(StaticPolicy(0))
        expected = results(llm)
        llm.engine.set_policy(StaticPolicy(K))
        assert results(llm) == expected
        llm.sleep()
        llm.wake_up()
        assert results(llm) == expected
        assert llm.metrics().num_accepted_tokens > 0
