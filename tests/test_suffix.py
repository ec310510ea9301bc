"""Drafts from texts on the host change no token."""

from dataclasses import replace

import pytest
from support.engines import generate_tokens, make_llm, random_prompts, simulated_engines
from support.shared_models import VOCAB, eagle3, llama

from specjax import SamplingParams


def prompts_of(count, seed=0):
    """Return prompts that repeat themselves, so that drafts are found."""
    parts = random_prompts(*[9] * count, vocab_size=VOCAB, seed=seed)
    return [part * 4 for part in parts]


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_drafts(checkpoints):
    """With a step in flight and without, of prompts that nothing is known of at first."""
    folder = llama(checkpoints).folder
    params = [SamplingParams(temperature=t, max_tokens=40, seed=7, ignore_eos=True) for t in (0, 1)]
    with (
        make_llm(folder) as plain,
        make_llm(folder, "suffix") as ours,
        make_llm(
            folder, "eagle3", eagle3(checkpoints).folder, speculation={"with": ["suffix"]}
        ) as both,
    ):
        for is_async in True, False:
            prompts = prompts_of(6, seed=is_async)
            for llm in ours, both:
                llm.engine.config = replace(llm.engine.config, async_scheduling=is_async)
            expected = [generate_tokens(plain, prompts, one) for one in params]
            for one, tokens in [*zip(params, expected, strict=True)] * 2:
                assert generate_tokens(ours, prompts, one) == tokens
                assert generate_tokens(both, prompts, one) == tokens
        for llm, drafter in (ours, "ngram"), (both, "eagle3"):
            m = llm.metrics()
            for name in "drafts", "draft_tokens", "accepted_tokens":
                counts = getattr(m, f"{name}_per_source")
                assert counts.keys() <= {drafter, "suffix"}
                assert sum(counts.values()) == getattr(m, f"num_{name}")
            assert (
                m.accepted_tokens_per_source["suffix"] > 0.5 * m.draft_tokens_per_source["suffix"]
            )


def test_adaptive_k_with_texts(checkpoints):
    """On a simulated device, requests draft as many tokens as their texts suggest."""
    folder, prompts = llama(checkpoints).folder, prompts_of(6)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    adaptive = {"adaptive": True}
    with (
        simulated_engines(),
        make_llm(folder) as plain,
        make_llm(folder, "suffix", speculation=adaptive) as ours,
    ):
        expected = generate_tokens(plain, prompts, params)
        for _ in range(3):
            assert generate_tokens(ours, prompts, params) == expected
        m = ours.metrics()
        assert m.accepted_tokens_per_source["suffix"] > 0.9 * m.draft_tokens_per_source["suffix"]
        assert m.num_steps < 2.5 * plain.metrics().num_steps
