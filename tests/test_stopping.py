"""An output ends at its stop text, stop id or length, anywhere within a step.

A simulated device has accepted runs of all lengths, so that ends lie inside them. The oracle
decodes every prefix of an unstopped output, and cuts at the first stop text. test_end_to_end.py
checks the same on the real device.
"""

import re
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from support.engines import ANY_SHAPES, assert_idle, generate, patched
from support.scripts import TextScript
from support.stopping import (
    FREE,
    assert_stopped,
    cut,
    run_on,
    some_stops,
    text_between,
)
from support.texts import simulated_llm

from specjax.bench.workload import read_questions
from specjax.checkpoint.demo import demo_folder
from specjax.host.speculation.policy import StaticPolicy
from specjax.text.tokenizer import load_tokenizer

EOS, VOCAB, K = 1, 2048, 3
SETTINGS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    **ANY_SHAPES,
    "page_size": 16,
    "num_pages": 9,  # one request at its longest, or two that are short
}


@pytest.fixture(scope="module")
def engines():
    """Engines with and without drafts, whose outputs have repeated words, line ends and EOS."""
    demo = demo_folder("demo-llama")
    tokenizer = load_tokenizer(demo)
    pieces = [tokenizer.decode([i]) for i in range(VOCAB)]
    words = [i for i, piece in enumerate(pieces) if re.fullmatch(" ?[a-y]+", piece)]
    ids = (*words[:: len(words) // 40], pieces.index("\n"), pieces.index("e"))
    assert len(set(ids)) > 40 and EOS not in ids
    script = TextScript(VOCAB, ids=(*ids, EOS, EOS, EOS))
    with (
        simulated_llm(demo, "ngram", k=K, script=script, **SETTINGS) as llm,
        simulated_llm(demo, script=script, **SETTINGS) as plain,
    ):
        yield llm, plain


@pytest.fixture(scope="module")
def llm(engines):
    return engines[0]


@pytest.fixture(scope="module")
def longs(llm):
    """Outputs that nothing stops: eight greedy ones, then eight at temperature 1."""
    texts = [f"Question: {question}\nAnswer:" for question in read_questions()]
    prompts = sorted((llm.tokenizer.encode(text)[-29:] for text in texts), key=sum)[:16]
    params = [replace(FREE, temperature=float(i >= 8), seed=i) for i in range(len(prompts))]
    return run_on(llm, prompts, params)


@pytest.mark.parametrize("k, is_async", [(K, True), (K, False), (5, True), (0, True)])
def test_any_texts(llm, longs, k, is_async):
    """A hundred requests share two slots and nine pages.

    Some stop texts occur with the first token, some before `min_tokens`, and some never. Accepted
    tokens after a stop text are dropped, and not counted.
    """
    rng = np.random.default_rng(k)
    chosen = [longs[i] for i in rng.integers(0, len(longs), 100)]
    params = []
    for i, long in enumerate(chosen):
        stop = some_stops(llm, long, rng) if i % 10 else (text_between(llm, long, 0, 1) or "e",)
        max_tokens = int(rng.integers(1, 49))
        one = replace(long.params, stop=stop, max_tokens=max_tokens)
        min_tokens = int(rng.choice([0, 0, max_tokens // 2]))
        params.append(
            replace(one, min_tokens=min_tokens, include_stop_str_in_output=bool(rng.integers(2)))
        )
    params[::7] = [replace(one, stop=()) for one in params[::7]]
    before = llm.metrics().num_generation_tokens
    llm.engine.set_policy(StaticPolicy(k))
    with patched(llm.engine, "config", replace(llm.engine.config, async_scheduling=is_async)):
        outputs = generate(llm, [long.prompt for long in chosen], params)
    llm.engine.set_policy(StaticPolicy(K))
    assert_stopped(llm, outputs, params, chosen)
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    assert llm.metrics().num_generation_tokens - before == sum(counts)
    assert_idle(llm)
    stopped = [
        (count, long)
        for count, long, output in zip(counts, chosen, outputs, strict=True)
        if output.outputs[0].finish_reason == "stop"
    ]
    assert min(counts) == 1 and len(stopped) > 30
    assert k != K or sum(count not in accumulate(long.runs) for count, long in stopped) > 10


def test_samples_stop_each_by_itself(llm, longs):
    """A sample that stops frees its own pages. The shared pages are freed with the last sample."""
    prompt, stop = longs[8].prompt, ("e", " 2", "\n")
    free = replace(longs[8].params, n=4, max_tokens=40)
    (whole,) = generate(llm, prompt, free)
    (output,) = generate(llm, prompt, replace(free, stop=stop))
    assert len({sample.text for sample in whole.outputs}) == 4
    for sample, long in zip(output.outputs, whole.outputs, strict=True):
        expected = cut(llm.tokenizer, long.token_ids, stop)
        assert (sample.token_ids, sample.text, sample.stop_reason) == expected
    assert_idle(llm)


def test_stop_ids(engines, longs):
    """The first stop id ends the output, also inside a run. It is kept, but adds no text."""
    params = []
    for i, long in enumerate(longs):
        ids = [long.token_ids[j] for j in (11 + i, 30)]
        params.append(replace(long.params, stop_token_ids=ids, stop=[(), ("zz", "?!")][i % 2]))
    for llm in engines:
        outputs = generate(llm, [long.prompt for long in longs], params)
        for output, wish, long in zip(outputs, params, longs, strict=True):
            place = min(long.token_ids.index(token) for token in wish.stop_token_ids)
            assert_ended(llm, output, long.token_ids[: place + 1], long.token_ids[place])
        assert_idle(llm)


def assert_ended(llm, output, token_ids, reason):
    sample = output.outputs[0]
    assert sample.token_ids == token_ids
    assert sample.text == llm.tokenizer.decode(token_ids[:-1])
    assert (sample.finish_reason, sample.stop_reason) == ("stop", reason)


@pytest.mark.slow
def test_ends_of_sequence(engines, longs):
    """EOS may be ignored, and it may be one of the stop ids."""
    ended = [(long, long.token_ids.index(EOS)) for long in longs if EOS in long.token_ids[2:40]]
    assert len(ended) >= 3

    def outputs(llm, num_more=0, **changes):
        """Return (output, tokens without stops, index of EOS in these tokens) for each request."""
        params = [
            replace(long.params, min_tokens=num_more and place + num_more, **changes)
            for long, place in ended
        ]
        found = generate(llm, [long.prompt for long, _ in ended], params)
        pairs = zip(found, ended, strict=True)
        return [(output, long.token_ids, place) for output, (long, place) in pairs]

    for llm in engines:
        for ignore_eos, ids in (False, []), (False, [EOS]), (True, [EOS]):
            for output, token_ids, place in outputs(llm, ignore_eos=ignore_eos, stop_token_ids=ids):
                assert_ended(llm, output, token_ids[: place + 1], EOS if ids else None)
        # Until min_tokens are there, another token stands where the end would have.
        for output, token_ids, place in outputs(llm, 6, ignore_eos=False):
            found = output.outputs[0].token_ids
            assert found[:place] == token_ids[:place]
            assert len(found) >= place + 6 and EOS not in found[: place + 6]
        assert_idle(llm)
