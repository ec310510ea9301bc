"""Calls of users on the real device, for facts that the simulated device cannot show.

All other tests of streams, callers, aborts and errors use the simulated device.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import assert_idle, generate, generate_tokens, make_llm, tokens_of
from support.stopping import (
    FREE,
    assert_stopped,
    cut,
    in_runs,
    run_on,
    some_stops,
    text_between,
)
from support.texts import LETTERS_EOS

from specjax import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HOT = SamplingParams(temperature=0.8, seed=3, max_tokens=24)


@pytest.fixture(scope="module")
def llm(letters):
    """An LLM with drafts."""
    with make_llm(letters, "ngram") as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(letters):
    with make_llm(letters) as plain:
        yield plain


def test_ends_of_sequence(llm, plain):
    """A sample ends where another sample that ignores EOS has one, unless min_tokens forbids it."""
    free = SamplingParams(temperature=2.0, max_tokens=60, ignore_eos=True)
    tries = [replace(free, seed=seed) for seed in range(24)]
    whole = generate_tokens(llm, [[1, 2, 3]] * 24, tries)
    ended = [replace(one, ignore_eos=False) for one in tries]
    for one in llm, plain:
        outputs = [output.outputs[0] for output in generate(one, [[1, 2, 3]] * 24, ended)]
        assert sum(output.finish_reason == "stop" for output in outputs) >= 2
        for output, ids in zip(outputs, whole, strict=True):
            until_eos = ids[: ids.index(LETTERS_EOS) + 1] if LETTERS_EOS in ids else ids
            assert output.token_ids == until_eos and output.stop_reason is None
            assert output.text == one.tokenizer.decode([i for i in until_eos if i != LETTERS_EOS])
        later = [replace(one, min_tokens=60) for one in ended]
        assert all(len(ids) == 60 for ids in generate_tokens(one, [[1, 2, 3]] * 24, later))


@pytest.mark.slow
def test_stops(llm, plain):
    """Stop texts that end inside an accepted run of drafts, other stop texts, and stop ids."""
    rng, wishes = np.random.default_rng(1), []
    prompts = rng.integers(0, LETTERS_EOS, (8, 12)).tolist()
    free = replace(FREE, max_tokens=32)
    params = [replace(free, temperature=float(i % 4 == 3), seed=i) for i in range(len(prompts))]
    longs = run_on(llm, prompts, params)
    for long in longs:
        wishes.append((long, some_stops(llm, long, rng)))
        for start, length in in_runs(long):
            end = start + length - 1  # of the run, all but the last token
            stops = [text_between(llm, long, max(end - n, 0), end) for n in (2, 4, 8, 12)]
            new = [s for s in stops if len(cut(llm.tokenizer, long.token_ids, [s])[0]) == end]
            if length > 2 and new:
                wishes.append((long, (new[0],)))
    assert len(wishes) >= len(longs) + 3
    by_text = [replace(long.params, stop=stop) for long, stop in wishes]
    by_id = [
        replace(long.params, stop_token_ids=[long.token_ids[j] for j in (11 + i, 25)])
        for i, long in enumerate(longs)
    ]
    for one in llm, plain:
        before = one.metrics().num_generation_tokens
        outputs = generate(one, [long.prompt for long, _ in wishes], by_text)
        assert_stopped(one, outputs, by_text, [long for long, _ in wishes])
        num_tokens = sum(map(len, tokens_of(outputs)))
        assert one.metrics().num_generation_tokens - before == num_tokens
        outputs = generate(one, prompts, by_id)
        for output, wish, long in zip(outputs, by_id, longs, strict=True):
            place = min(long.token_ids.index(token) for token in wish.stop_token_ids)
            sample = output.outputs[0]
            assert sample.token_ids == long.token_ids[: place + 1]
            assert (sample.finish_reason, sample.stop_reason) == ("stop", long.token_ids[place])
        assert_idle(one)
    assert llm.metrics().num_accepted_tokens > 0 == plain.metrics().num_drafts


@pytest.mark.slow
def test_a_logits_processor_that_raises_takes_nobody_along(letters, ragged_prompts):
    """The device loses its state.

    Other requests recompute their tokens, and the engine continues.
    """

    def check(length):
        if length >= 14:
            raise RuntimeError("no such length")
        return np.float32(0)

    def processor(tokens, length, logits):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return logits + jax.pure_callback(check, shape, length, vmap_method="sequential")

    prompts = ragged_prompts(3, 10, 20, 5)
    params = [HOT, replace(HOT, logits_processors=[processor]), HOT, GREEDY]
    # Rounds of as many rows as requests: processors are computed for every row of a round.
    sizes = {"max_num_seqs": 2, "decode_batches": (1, 2), "max_num_batched_tokens": 32}
    with make_llm(letters, **sizes, prefill_shapes=((1, 32),)) as llm:
        pairs = zip(prompts, [HOT, HOT, HOT, GREEDY], strict=True)
        expected = [generate_tokens(llm, *pair)[0] for pair in pairs]
        before = llm.metrics()
        for _ in range(2):
            outputs = generate(llm, prompts, params)
            (failed,) = outputs.pop(1).outputs
            assert failed.finish_reason == "error" and "no such length" in str(failed.error)
            assert failed.token_ids == expected[1][: len(failed.token_ids)]
            assert tokens_of(outputs) == [expected[i] for i in (0, 2, 3)]
            assert_idle(llm)
        after = llm.metrics()
        assert after.requests_finished["error"] - before.requests_finished.get("error", 0) == 2
        assert after.num_preemptions > before.num_preemptions
        # Where it does not raise, the processor itself goes on working.
        short = replace(params[1], max_tokens=4)
        assert generate_tokens(llm, prompts[0], short) == [expected[0][:4]]
