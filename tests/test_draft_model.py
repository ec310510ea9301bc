"""A model as a drafter: its cached values equal those of a new run over all tokens.

If the target drafts for itself, every draft is right, unless a row of the drafter's cache is
missing, outdated or misplaced. Rows may go wrong after rounds that accept all or some drafts, after
rounds without drafts, after cached prefixes and after preemption.
"""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from support.dynamic_k import InTurn
from support.engines import K, generate_tokens, give_pages, hold_pages, make_llm, random_prompts
from support.shared_models import VOCAB, hybrid, llama

from specjax import SamplingParams
from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import describe_model, read_config

PROMPTS = random_prompts(1, 5, 32, 33, 40, 64, 7, 31, vocab_size=VOCAB - 1, seed=1)


@pytest.fixture(scope="module", params=["llama", pytest.param("hybrid", marks=pytest.mark.slow)])
def folder(request, checkpoints):
    return llama(checkpoints).folder if request.param == "llama" else hybrid(checkpoints)


@pytest.fixture(scope="module")
def llm(folder):
    """An LLM whose target drafts for itself, with another K in every round."""
    with make_llm(folder, "draft_model", folder) as llm:
        llm.engine.set_policy(InTurn(3, 1, 0, 3, 0, 0, 1, 1, 3, 3))
        yield llm


@pytest.fixture(scope="module")
def plain(folder):
    with make_llm(folder) as llm:
        yield llm


def params_of(temperature):
    free = SamplingParams(temperature=temperature, ignore_eos=True)
    return [replace(free, seed=i, max_tokens=(20, 7, 31, 2)[i % 4]) for i in range(len(PROMPTS))]


def assert_always_right(llm, plain, prompts, params):
    """Check that tokens are as without drafts, and that all usable drafts were accepted."""
    before = llm.metrics()
    assert generate_tokens(llm, prompts, params) == generate_tokens(plain, prompts, params)
    after = llm.metrics()
    num_drafts = after.num_draft_tokens - before.num_draft_tokens
    assert after.num_accepted_tokens - before.num_accepted_tokens == num_drafts > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_target_that_drafts_for_itself_is_always_right(llm, plain, temperature):
    assert_always_right(llm, plain, PROMPTS, params_of(temperature))


def test_it_is_right_after_a_cached_prefix(llm, plain):
    prompt, params = PROMPTS[0] * 40, params_of(0.0)[0]
    generate_tokens(llm, prompt, params)
    before = llm.metrics().prefix_cache_hits
    assert_always_right(llm, plain, [*prompt, 3, 5], params)
    assert llm.metrics().prefix_cache_hits > before


def test_it_is_right_after_a_preemption(llm, plain):
    prompts = [prompt for prompt in PROMPTS if 30 < len(prompt) < 50]
    params = [replace(one, max_tokens=40) for one in params_of(0.8)[: len(prompts)]]
    before = llm.metrics().num_preemptions
    taken = hold_pages(llm, 20)
    try:
        assert_always_right(llm, plain, prompts, params)
    finally:
        give_pages(llm, taken)
    assert llm.metrics().num_preemptions > before


def test_another_vocabulary_needs_the_targets_tokenizer(checkpoints):
    other = checkpoints.target("llama", vocab_size=VOCAB - 1).folder
    target = describe_model(read_config(llama(checkpoints).folder))
    config = SpeculativeConfig(method="draft_model", model=str(other), num_speculative_tokens=2)
    with pytest.raises(CheckpointError, match="vocab_size=95 .* the target's 96, .* Model value"):
        load_drafter(other, config, target, np.dtype("float32"))


@pytest.mark.slow
def test_a_recurrent_drafter_goes_on_from_a_snapshot_of_its_own(checkpoints):
    """The target is not recurrent, so it would need no snapshots."""
    prompt = PROMPTS[5]
    longer = [*prompt, 3, 5]
    target, drafter = llama(checkpoints).folder, hybrid(checkpoints)
    with make_llm(target, "draft_model", drafter, k=1, compile_ahead=False) as llm:

        def state_after(prompt):
            llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
            caches = llm.engine.programs.state.drafter.caches
            return np.concatenate([c.state[:, 0].ravel() for c in caches if hasattr(c, "state")])

        cold = state_after(longer)
        llm.reset_prefix_cache()
        state_after(prompt)
        hits = llm.metrics().prefix_cache_hits
        other = state_after(prompt[:7])  # what is in the slot otherwise
        assert np.abs(other - cold).max() > 0.01
        np.testing.assert_allclose(state_after(longer), cold, rtol=0, atol=1e-5)
        assert llm.metrics().prefix_cache_hits > hits


def test_it_drafts_nothing_after_the_positions_it_was_made_for(tmp_path, checkpoints):
    """The drafter is the target with a smaller maximum position."""
    folder, most = llama(checkpoints).folder, 48
    short = shutil.copytree(folder, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": most}))
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40)
    with make_llm(folder, "draft_model", short) as llm, make_llm(folder) as plain:
        assert_always_right(llm, plain, PROMPTS[2], params)
        rounds = llm.metrics()
    # Up to there, each round has K drafts and one token of the target.
    assert rounds.num_draft_tokens == (most - len(PROMPTS[2])) // (K + 1) * K
