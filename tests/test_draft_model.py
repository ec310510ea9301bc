"""A model as the drafter of another: what it keeps of every token is what running it anew gives.

With the target as its own drafter every draft is right, but only if no row is missing, old or out
of place in the drafter's cache: after a round that accepted all its drafts or some, one without
drafts, a cached prefix, or a preemption.
"""

from dataclasses import replace

import numpy as np
import pytest
from support.engines import give_pages, hold_pages, make_llm
from support.shared_models import VOCAB, hybrid, llama

from specjax import SamplingParams
from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import describe_model, read_config
from specjax.host.speculation.policy import PolicyRule

TURNS = (3, 1, 0, 3, 0, 0, 1, 1, 3, 3)


class Turns(PolicyRule):
    """K of every round from a list, over and over."""

    choices = (0, 1, 3)

    def __init__(self):
        self.num_rounds = 0

    def choose(self, load):
        self.num_rounds += load.num_sequences > 0
        return TURNS[self.num_rounds % len(TURNS)]


@pytest.fixture(scope="module", params=["llama", pytest.param("hybrid", marks=pytest.mark.slow)])
def folder(request, checkpoints):
    return llama(checkpoints).folder if request.param == "llama" else hybrid(checkpoints)


@pytest.fixture(scope="module")
def llm(folder):
    """The target drafts for itself, and K is another in every round."""
    with make_llm(folder, "draft_model", folder) as llm:
        llm.engine.set_policy(Turns())
        yield llm


@pytest.fixture(scope="module")
def plain(folder):
    with make_llm(folder) as llm:
        yield llm


def requests(temperature):
    rng = np.random.default_rng(1)
    lengths = (1, 5, 32, 33, 40, 64, 7, 31)
    prompts = [rng.integers(0, VOCAB - 1, length).tolist() for length in lengths]
    params = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=(20, 7, 31, 2)[i % 4], ignore_eos=True
        )
        for i in range(len(lengths))
    ]
    return prompts, params


def tokens_of(llm, prompts, params):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, False)]


def missed(llm, prompts, params):
    """Tokens, and how many of the drafts that could have been accepted were not."""
    before = llm.metrics()
    tokens = tokens_of(llm, prompts, params)
    after = llm.metrics()
    num_drafts = after.num_draft_tokens - before.num_draft_tokens
    assert num_drafts > 0
    return tokens, num_drafts - (after.num_accepted_tokens - before.num_accepted_tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_target_that_drafts_for_itself_is_always_right(llm, plain, temperature):
    prompts, params = requests(temperature)
    tokens, num_missed = missed(llm, prompts, params)
    assert tokens == tokens_of(plain, prompts, params)
    assert num_missed == 0


def test_it_is_right_after_a_cached_prefix(llm, plain):
    (prompt, *_), (params, *_) = requests(0.0)
    prompt = prompt * 40
    tokens_of(llm, [prompt], [params])
    before = llm.metrics().prefix_cache_hits
    tokens, num_missed = missed(llm, [[*prompt, 3, 5]], [params])
    assert llm.metrics().prefix_cache_hits > before
    assert tokens == tokens_of(plain, [[*prompt, 3, 5]], [params])
    assert num_missed == 0


def test_it_is_right_after_a_preemption(llm, plain):
    prompts, params = requests(0.8)
    prompts = [prompt for prompt in prompts if 30 < len(prompt) < 50]
    params = [replace(one, max_tokens=40) for one in params[: len(prompts)]]
    before = llm.metrics().num_preemptions
    taken = hold_pages(llm, 20)
    try:
        tokens, num_missed = missed(llm, prompts, params)
    finally:
        give_pages(llm, taken)
    assert llm.metrics().num_preemptions > before
    assert tokens == tokens_of(plain, prompts, params)
    assert num_missed == 0


def test_another_vocabulary_needs_the_targets_tokenizer(checkpoints):
    other = checkpoints.target("llama", vocab_size=VOCAB - 1).folder
    target = describe_model(read_config(llama(checkpoints).folder))
    config = SpeculativeConfig(method="draft_model", model=str(other), num_speculative_tokens=2)
    with pytest.raises(CheckpointError, match="vocab_size=95 .* the target's 96, .* Model value"):
        load_drafter(other, config, target, np.dtype("float32"))


@pytest.mark.slow
def test_a_recurrent_drafter_goes_on_from_a_snapshot_of_its_own(checkpoints):
    """Of a target that has no state, and would need no snapshots."""
    (*_, prompt, _, _), _ = requests(0.0)
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
