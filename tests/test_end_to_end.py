"""The public doors on the real device: what the simulated one cannot say, drafts and plain.

Everything else about streams, callers, aborts and errors is tested on the simulated device.
"""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import make_llm
from support.texts import LETTERS_EOS, letters_folder

from specjax import AsyncLLM, SamplingParams
from specjax.text.seeds import derived_seed

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HOT = SamplingParams(temperature=0.8, seed=3, max_tokens=24)


@pytest.fixture(scope="module")
def folder(checkpoints):
    return letters_folder(checkpoints)


@pytest.fixture(scope="module")
def llm(folder):
    """With drafts."""
    with make_llm(folder, "ngram") as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(folder):
    with make_llm(folder) as plain:
        yield plain


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def is_idle(llm):
    scheduler = llm.engine.scheduler
    return scheduler.pages.num_free == scheduler.pages.num_pages and not scheduler.has_work


def test_outputs_are_in_order_and_those_of_plain_decoding(llm, plain, ragged_prompts):
    prompts = ragged_prompts(9, 2, 50, 1, 33, 7)
    lengths = [9, 1, 30, 2, 8, 30]
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in lengths]
    params[5] = dataclasses.replace(params[5], temperature=1.2, seed=4)
    together = generate(llm, prompts, params)
    assert [output.prompt_token_ids for output in together] == prompts
    assert [len(ids) for ids in tokens(together)] == lengths
    alone = [generate(plain, p, s)[0] for p, s in zip(prompts, params, strict=True)]
    assert tokens(together) == tokens(alone)
    assert llm.metrics().num_accepted_tokens > 0 == plain.metrics().num_drafts


def test_ends_of_sequence(llm, plain):
    """Where a sample that ignores them has one, one that does not ends."""
    free = SamplingParams(temperature=2.0, max_tokens=60, ignore_eos=True)
    tries = [dataclasses.replace(free, seed=seed) for seed in range(24)]
    whole = tokens(generate(llm, [[1, 2, 3]] * 24, tries))
    ended = [dataclasses.replace(one, ignore_eos=False) for one in tries]
    for one in llm, plain:
        outputs = [output.outputs[0] for output in generate(one, [[1, 2, 3]] * 24, ended)]
        assert sum(output.finish_reason == "stop" for output in outputs) >= 2
        for output, ids in zip(outputs, whole, strict=True):
            until_eos = ids[: ids.index(LETTERS_EOS) + 1] if LETTERS_EOS in ids else ids
            assert output.token_ids == until_eos and output.stop_reason is None
            assert output.text == one.tokenizer.decode([i for i in until_eos if i != LETTERS_EOS])


@pytest.mark.parametrize("seed", [4, None])
def test_samples_are_those_of_single_requests(llm, plain, ragged_prompts, seed):
    """With the seeds that are derived for them, whatever part of the prompt they share."""
    params = SamplingParams(temperature=1.2, seed=seed, n=3, max_tokens=9, ignore_eos=True)
    for result in generate(llm, ragged_prompts(1, 16, 45), params):
        first = derived_seed(0, int(result.request_id)) if seed is None else seed
        seeds = [first, derived_seed(first, 1), derived_seed(first, 2)]
        single = [dataclasses.replace(params, n=1, seed=seed) for seed in seeds]
        alone = tokens(generate(plain, [result.prompt_token_ids] * 3, single))
        assert alone == [output.token_ids for output in result.outputs]
        assert len(set(map(tuple, alone))) == 3
    assert is_idle(llm)


def test_outputs_that_grow(llm, ragged_prompts):
    prompts, params = ragged_prompts(3, 37, 9), [GREEDY, HOT, dataclasses.replace(HOT, n=2)]
    expected = generate(llm, prompts, params)
    grown: dict[int, list] = {}
    for output in llm.generate_stream(prompts, params):
        grown.setdefault(output.request_id, []).append(output)
    for outputs, whole in zip(grown.values(), expected, strict=True):
        assert outputs[-1].outputs == whole.outputs and len(outputs) > 1
        for before, after in zip(outputs, outputs[1:], strict=False):
            for old, new in zip(before.outputs, after.outputs, strict=True):
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
                assert new.text.startswith(old.text)
    stream = llm.generate_stream(prompts, params)
    next(stream)
    stream.close()
    assert is_idle(llm)
    assert [one.outputs for one in generate(llm, prompts, params)] == [
        one.outputs for one in expected
    ]


def test_many_callers(llm, monkeypatch, ragged_prompts):
    prompts = ragged_prompts(*(1 + 7 * i % 45 for i in range(12)))
    params = [
        dataclasses.replace(GREEDY, temperature=i % 2 * 0.8, seed=i, max_tokens=1 + 5 * i % 24)
        for i in range(len(prompts))
    ]
    expected = generate(llm, prompts, params)
    monkeypatch.setattr("specjax.async_llm.LLM", lambda *_, **__: llm)
    monkeypatch.setattr(llm, "close", lambda: None)

    async def serve():
        async with AsyncLLM("") as served:
            calls = zip(prompts, params, strict=True)
            given_up = asyncio.ensure_future(served.generate([1], GREEDY))
            outputs = asyncio.gather(*(served.generate(*one) for one in calls))
            given_up.cancel()
            return await asyncio.wait_for(outputs, 60)

    assert [one.outputs for one in asyncio.run(serve())] == [one.outputs for one in expected]
    assert is_idle(llm)
    assert llm.metrics().compile_seconds > 0 == llm.metrics().num_compiles_after_warmup


@pytest.fixture(scope="module")
def small(folder):
    """Rounds of as many rows as requests: processors are computed for every row of a round."""
    sizes = {"max_num_seqs": 2, "decode_batches": (1, 2), "max_num_batched_tokens": 32}
    with make_llm(folder, **sizes, prefill_shapes=((1, 32),)) as small:
        yield small


@pytest.mark.slow
def test_a_logits_processor_that_raises_takes_nobody_along(small, ragged_prompts):
    """The device loses all it knew; the others run their tokens again, and the engine goes on."""

    def check(length):
        if length >= 14:
            raise RuntimeError("no such length")
        return np.float32(0)

    def processor(tokens, length, logits):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return logits + jax.pure_callback(check, shape, length, vmap_method="sequential")

    prompts = ragged_prompts(3, 10, 20, 5)
    params = [HOT, dataclasses.replace(HOT, logits_processors=[processor]), HOT, GREEDY]
    expected = [
        tokens(generate(small, prompt, one))[0]
        for prompt, one in zip(prompts, [HOT, HOT, HOT, GREEDY], strict=True)
    ]
    before = small.metrics()
    for _ in range(2):
        outputs = generate(small, prompts, params)
        (failed,) = outputs[1].outputs
        assert failed.finish_reason == "error" and "no such length" in str(failed.error)
        assert failed.token_ids == expected[1][: len(failed.token_ids)]
        assert [tokens(outputs)[i] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
        assert is_idle(small)
    after = small.metrics()
    assert after.requests_finished["error"] - before.requests_finished.get("error", 0) == 2
    assert after.num_preemptions > before.num_preemptions
    # Where it does not raise, the processor itself goes on working.
    short = dataclasses.replace(params[1], max_tokens=4)
    assert tokens(generate(small, prompts[0], short)) == [expected[0][:4]]
