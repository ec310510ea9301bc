"""Corpora give drafts until they are removed, and unusable ones are refused."""

import asyncio
import re

import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import SIZES, generate_tokens, make_llm, random_prompts, simulated_engines
from support.refusals import refusal
from support.shared_models import VOCAB, llama

from specjax import LLM, AsyncLLM, SamplingParams
from specjax.serving.corpora import read_corpus
from specjax.text.tokenizer import load_tokenizer

CONFIG = {"method": "suffix", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def llm(checkpoints):
    with simulated_engines(), make_llm(llama(checkpoints).folder, "suffix") as llm:
        yield llm


def test_a_corpus_is_drafted_from_until_it_is_removed(llm):
    prompts = random_prompts(20, 30, vocab_size=VOCAB)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = generate_tokens(llm, prompts, params)
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]

    def num_drafts():
        before = llm.metrics().drafts_per_source.get("corpus", 0)
        assert generate_tokens(llm, prompts, params) == outputs
        return llm.metrics().drafts_per_source.get("corpus", 0) - before

    suggester = llm.engine.scheduler.suggester
    suggester.sources = (suggester.named("corpus"),)
    llm.add_corpus("earlier", texts)
    llm.add_corpus("other", [[1, 2, 3]])
    assert num_drafts() >= 6
    llm.remove_corpus("earlier")
    assert num_drafts() == 0
    llm.remove_corpus("other")
    assert llm.engine.scheduler.suggester.named("corpus").names == []


BYTES = b"a", bytearray(b"a"), memoryview(b"a")
BAD = [
    (("", [[1]]), "its name must be a text"),
    (("a", "text"), "texts='text' must be a list of texts or of token ids"),
    (("a", []), "texts=[] must be a list"),
    (("a", [[]]), "corpus 'a': texts=[[]] have no tokens"),
    (("a", [[1, VOCAB]]), f"text 0: {VOCAB} must be a token id in 0..{VOCAB - 1}"),
    (("a", [[1], [2.5]]), "text 1: 2.5 must be a token id"),
    *((("a", [one]), "text 0 is bytes; decode") for one in BYTES),
    (("a", list(np.arange(2))), "text 0: np.int64(0) must be a list"),
    (("a", [[1], np.array(2)]), "text 1: array(2) must be a list"),
    (("a", [7]), "text 0: 7 must be a list of token ids"),
    (("there", [[1]]), "corpus 'there' exists"),
]


@pytest.mark.parametrize("given, message", BAD)
def test_bad_corpora_are_refused(llm, given, message):
    if given[0] == "there" and "there" not in llm.engine.scheduler.suggester.named("corpus").names:
        llm.add_corpus("there", [[1]])
    with pytest.raises(ValueError, match=re.escape(message)):
        llm.add_corpus(*given)
    for name in "none", np.array(["a", "b"]):
        refusal(lambda name=name: llm.remove_corpus(name), f"corpus {name!r} does not exist")


def test_texts_that_cannot_be_tokenised_or_have_no_tokens(letters):
    tokenizer = load_tokenizer(letters)
    refusal(lambda: read_corpus("a", ["b", "c\ud83d"], tokenizer, 96), "'a', text 1", "surrogate")
    refusal(lambda: read_corpus("a", ["", ""], tokenizer, 96), "texts=['', ''] have no tokens")
    assert len(read_corpus("a", ["", "b"], tokenizer, 96)) == 2  # as an empty file among others
    arrays = [np.arange(3), jnp.arange(2)]
    assert read_corpus("a", arrays, None, 96) == [[0, 1, 2], [0, 1]]


def test_counts_with_and_without_a_step_in_flight(checkpoints):
    """Counts are equal in each run.

    Without a step in flight, the host knows the tokens of one more round. So its drafts may differ,
    unless the texts predict these tokens, as here.
    """
    prompts = random_prompts(20, 30, vocab_size=VOCAB)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    counts = []
    with simulated_engines():
        for is_async in True, True, False:
            with make_llm(llama(checkpoints).folder, "suffix", async_scheduling=is_async) as llm:
                outputs = generate_tokens(llm, prompts, params)
                first = llm.metrics().accepted_tokens_per_source
                llm.add_corpus("outputs", [a + b for a, b in zip(prompts, outputs, strict=True)])
                suggester = llm.engine.scheduler.suggester
                suggester.sources = (suggester.named("corpus"),)
                assert generate_tokens(llm, prompts, params) == outputs
                m = llm.metrics()
            both = m.drafts_per_source, m.draft_tokens_per_source, m.accepted_tokens_per_source
            counts.append((first, [one["corpus"] for one in both]))
    assert counts[0] == counts[1] and counts[1][1] == counts[2][1]
    _, num_drafts, num_accepted = counts[2][1]
    assert num_accepted == num_drafts > 40


def test_corpora_of_an_async_llm(checkpoints):
    async def main():
        async with AsyncLLM(folder, speculative_config=CONFIG, **SIZES) as llm:
            await llm.add_corpus("a", [[1, 2, 3]])
            with pytest.raises(ValueError, match="corpus 'a' exists"):
                await llm.add_corpus("a", [[1]])
            await llm.remove_corpus("a")
            with pytest.raises(ValueError, match="corpus 'a' does not exist"):
                await llm.remove_corpus("a")

    folder = llama(checkpoints).folder
    with simulated_engines():
        asyncio.run(main())


def test_an_engine_without_sources_has_no_corpora(checkpoints):
    with simulated_engines(), LLM(llama(checkpoints).folder, **SIZES) as llm:
        with pytest.raises(ValueError, match="does not draft from texts"):
            llm.add_corpus("a", [[1]])
