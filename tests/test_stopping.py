"""An output ends where its text, a stop id or its length says, wherever in a step that falls.

On a simulated device, whose accepted runs have all lengths, so that ends lie inside them. The
oracle decodes every prefix of the output that was not stopped, and cuts where a stop text first
shows. What it says is then asked of the real device, too.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from support.scripts import TextScript
from support.stopping import (
    FREE,
    assert_idle,
    assert_stopped,
    cut,
    generate,
    in_runs,
    run_on,
    some_stops,
    text_between,
)
from support.texts import simulated_llm

from specjax.bench.workload import read_questions
from specjax.checkpoint.demo import demo_folder
from specjax.host.plans import DecodePlan
from specjax.host.speculation.policy import StaticPolicy
from specjax.text.tokenizer import load_tokenizer

EOS = 1
VOCAB = 2048
K = 3
NUM_PAGES = 9  # of 16 tokens: one request at its longest, or two that are short
SETTINGS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "decode_batches": None,
    "prefill_shapes": None,
    "page_size": 16,
    "num_pages": NUM_PAGES,
}


@pytest.fixture(scope="module")
def script():
    """Words that come again now and then, line ends, and ends of sequence."""
    tokenizer = load_tokenizer(demo_folder("demo-llama"))
    pieces = [tokenizer.decode([i]) for i in range(VOCAB)]
    words = [i for i, piece in enumerate(pieces) if re.fullmatch(" ?[a-y]+", piece)]
    ids = (*words[:: len(words) // 40], pieces.index("\n"), pieces.index("e"))
    assert len(set(ids)) > 40 and EOS not in ids
    return TextScript(VOCAB, ids=(*ids, EOS, EOS, EOS))


@pytest.fixture(scope="module")
def llm(script):
    head = demo_folder("demo-llama-eagle3")
    demo = demo_folder("demo-llama")
    with simulated_llm(demo, "eagle3", model=head, k=K, script=script, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(script):
    with simulated_llm(demo_folder("demo-llama"), script=script, **SETTINGS) as plain:
        yield plain


@pytest.fixture(scope="module")
def prompts(llm):
    questions = read_questions()
    texts = [f"Question: {question}\nAnswer:" for question in questions]
    return sorted((llm.tokenizer.encode(text)[-29:] for text in texts), key=sum)[:16]


@pytest.fixture(scope="module")
def longs(llm, prompts):
    """Eight greedy ones, then eight at temperature 1."""
    params = [replace(FREE, temperature=float(i >= 8), seed=i) for i in range(len(prompts))]
    return run_on(llm, prompts, params)


# --- stop texts -----------------------------------------------------------------------------------


def test_runs_are_long_enough_to_end_inside(longs):
    lengths = [length for long in longs for length in long.runs]
    assert max(lengths) == K + 1 and lengths.count(K + 1) > 10 and lengths.count(1) > 10


def test_a_text_that_ends_inside_an_accepted_run(llm, plain, longs):
    """Accepted tokens past it do not stand, and are not counted."""
    params, stopped = [], []
    for long in longs:
        for start, length in in_runs(long):
            for place in range(1, length):  # tokens of the run that stand, the last one not
                stop = text_between(llm, long, start + place - 2, start + place)
                expected = cut(llm.tokenizer, long.token_ids, [stop])[0]
                if length == K + 1 and len(expected) == start + place:
                    params.append(replace(long.params, stop=stop))
                    stopped.append(long)
    assert len(params) >= 12
    params, stopped = params[:24], stopped[:24]
    before = llm.metrics().num_generation_tokens
    outputs = generate(llm, [long.prompt for long in stopped], params)
    assert_stopped(llm, outputs, params, stopped)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert llm.metrics().num_generation_tokens - before == num_tokens
    assert_idle(llm)
    few = slice(0, len(params), 6)
    outputs = generate(plain, [long.prompt for long in stopped[few]], params[few])
    assert_stopped(plain, outputs, params[few], stopped[few])


@pytest.mark.parametrize("min_tokens, include", [(0, True), (20, False)])
def test_any_texts(llm, longs, include, min_tokens):
    """Several texts, some of which overlap or show before `min_tokens`; 16 requests in 2 slots."""
    rng = np.random.default_rng(min_tokens + include)
    params = [
        replace(
            long.params,
            stop=some_stops(llm, long, rng),
            include_stop_str_in_output=include,
            max_tokens=int(rng.integers(25, 49)),
        )
        for long in longs
    ]
    if min_tokens:  # ends of sequence are ignored, so that it changes nothing else
        params = [replace(one, min_tokens=min_tokens) for one in params]
    before = llm.metrics().num_generation_tokens
    outputs = generate(llm, [long.prompt for long in longs], params)
    assert_stopped(llm, outputs, params, longs)
    assert sum(output.outputs[0].finish_reason == "stop" for output in outputs) >= 8
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert llm.metrics().num_generation_tokens - before == num_tokens
    assert_idle(llm)


def test_the_first_token_and_the_last_may_end_it(llm, longs):
    first = [text_between(llm, long, 0, 1) for long in longs[:4]]
    last = [text_between(llm, long, 20, 24) for long in longs[4:8]]
    params = [
        replace(long.params, stop=stop, max_tokens=24)
        for long, stop in zip(longs, first + last, strict=False)
    ]
    outputs = generate(llm, [long.prompt for long in longs[:8]], params)
    assert_stopped(llm, outputs, params, longs[:8])
    assert {len(output.outputs[0].token_ids) for output in outputs[:4]} == {1}
    assert any(len(output.outputs[0].token_ids) == 24 for output in outputs[4:])


def test_a_text_that_is_not_there(llm, longs):
    params = [replace(long.params, stop=["no such text", "\x00"]) for long in longs[:4]]
    outputs = generate(llm, [long.prompt for long in longs[:4]], params)
    assert_stopped(llm, outputs, params, longs[:4])


def test_samples_stop_each_by_itself(llm, longs):
    """The first one to stop frees its pages, the shared ones with the last."""
    prompt = longs[8].prompt
    free = replace(longs[8].params, n=4, max_tokens=40)
    (whole,) = generate(llm, prompt, free)
    texts = [sample.text for sample in whole.outputs]
    stop = ("e", " 2", "\n")
    (output,) = generate(llm, prompt, replace(free, stop=stop))
    assert len(set(texts)) == 4
    for sample, long in zip(output.outputs, whole.outputs, strict=True):
        expected = cut(llm.tokenizer, long.token_ids, stop)
        assert (sample.token_ids, sample.text, sample.stop_reason) == expected
    assert_idle(llm)


# --- slots and pages after a stop -----------------------------------------------------------------


def test_what_a_stopped_request_leaves_is_used_again(llm, longs):
    """Two dozen requests in two slots and nine pages, many stopped in flight: each as if alone."""
    rng = np.random.default_rng(7)
    which = rng.integers(0, len(longs), 24)
    chosen = [longs[i] for i in which]
    params = [
        replace(long.params, stop=some_stops(llm, long, rng), max_tokens=int(rng.integers(2, 49)))
        for long in chosen
    ]
    params[::7] = [replace(one, stop=()) for one in params[::7]]
    in_flight = []
    commit = llm.engine.scheduler.commit

    def watched(plan, outputs):
        if isinstance(plan, DecodePlan):
            in_flight.append(sum(sequence.is_finished for sequence in plan.sequences))
        return commit(plan, outputs)

    llm.engine.scheduler.commit = watched
    outputs = generate(llm, [long.prompt for long in chosen], params)
    del llm.engine.scheduler.commit
    assert sum(in_flight) >= 10
    assert_stopped(llm, outputs, params, chosen)
    assert_idle(llm)
    for i in 3, 17:
        (alone,) = generate(llm, chosen[i].prompt, params[i])
        assert alone.outputs == outputs[i].outputs


def test_without_async_scheduling_too(llm, longs):
    rng = np.random.default_rng(8)
    params = [replace(long.params, stop=some_stops(llm, long, rng)) for long in longs[4:12]]
    llm.engine.config = replace(llm.engine.config, async_scheduling=False)
    outputs = generate(llm, [long.prompt for long in longs[4:12]], params)
    llm.engine.config = replace(llm.engine.config, async_scheduling=True)
    assert_stopped(llm, outputs, params, longs[4:12])
    assert_idle(llm)


# --- stop ids and ends of sequence ----------------------------------------------------------------


def test_stop_ids(llm, plain, longs):
    """The first of them ends the output and stays, without its text; also inside a run."""
    params = []
    for i, long in enumerate(longs):
        ids = [long.token_ids[j] for j in (11 + i, 30)]
        params.append(replace(long.params, stop_token_ids=ids, stop=[(), ("zz", "?!")][i % 2]))
    for one, count in (llm, 16), (plain, 4):
        outputs = generate(one, [long.prompt for long in longs[:count]], params[:count])
        for output, wish, long in zip(outputs, params, longs, strict=False):
            place = min(long.token_ids.index(token) for token in wish.stop_token_ids)
            sample = output.outputs[0]
            assert sample.token_ids == long.token_ids[: place + 1]
            assert sample.text == one.tokenizer.decode(sample.token_ids[:-1])
            reason = ("stop", long.token_ids[place])
            assert (sample.finish_reason, sample.stop_reason) == reason
        assert_idle(one)


@pytest.fixture(scope="module")
def ended(llm, longs):
    """(prompt, tokens up to and with the end of sequence) of prompts whose answers end in time."""
    cues = ["#### ", " The answer is: #### 1", "\n#### 25", "So #### 3", " = 12.\n####", "####"]
    texts = [f"Question: How many {cue[-3:]}?\nAnswer: It is 2.\n{cue}" for cue in cues]
    prompts = [llm.tokenizer.encode(text) for text in texts]
    params = replace(FREE, ignore_eos=False, max_tokens=40)
    found = []
    for output in generate(llm, prompts, params):
        sample = output.outputs[0]
        if sample.token_ids[-1] == EOS and len(sample.token_ids) < 35:
            assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
            assert sample.text == llm.tokenizer.decode(sample.token_ids[:-1])
            found.append((output.prompt_token_ids, sample.token_ids))
    assert len(found) >= 3
    return found


def test_ends_of_sequence_may_be_ignored(llm, plain, ended):
    params = replace(FREE, max_tokens=40)
    prompts = [prompt for prompt, _ in ended]
    outputs = generate(llm, prompts, params)
    for (_, until_eos), output in zip(ended, outputs, strict=True):
        assert output.outputs[0].token_ids[: len(until_eos)] == until_eos
        assert len(output.outputs[0].token_ids) == 40
        assert output.outputs[0].finish_reason == "length"
    others = generate(plain, prompts[:2], params)
    assert [o.outputs[0].token_ids for o in others] == [o.outputs[0].token_ids for o in outputs[:2]]


def test_an_end_of_sequence_as_a_stop_id(llm, ended):
    """It is then a stop id like any other."""
    prompt, until_eos = ended[0]
    for ignore_eos in True, False:
        params = replace(FREE, ignore_eos=ignore_eos, stop_token_ids=[EOS], max_tokens=40)
        sample = generate(llm, prompt, params)[0].outputs[0]
        assert sample.token_ids == until_eos
        assert (sample.finish_reason, sample.stop_reason) == ("stop", EOS)


def test_min_tokens_keep_the_end_away(llm, plain, ended):
    """Until they are there, another token stands where the end would have."""
    params, prompts = [], [prompt for prompt, _ in ended]
    for _, until_eos in ended:
        params.append(replace(FREE, ignore_eos=False, max_tokens=40, min_tokens=len(until_eos) + 6))
    outputs = generate(llm, prompts, params)
    for (_, until_eos), one, output in zip(ended, params, outputs, strict=True):
        token_ids = output.outputs[0].token_ids
        assert token_ids[: len(until_eos) - 1] == until_eos[:-1]
        assert len(token_ids) >= one.min_tokens and EOS not in token_ids[: one.min_tokens]
    others = generate(plain, prompts[:3], params[:3])
    assert [o.outputs[0].token_ids for o in others] == [o.outputs[0].token_ids for o in outputs[:3]]
    few = replace(params[0], min_tokens=len(ended[0][1]) - 1)
    assert generate(llm, prompts[0], few)[0].outputs[0].token_ids == ended[0][1]


# --- at length ------------------------------------------------------------------------------------


def test_many_requests_and_more_drafts(llm, longs):
    rng = np.random.default_rng(5)
    chosen = [longs[i] for i in rng.integers(0, len(longs), 100)]
    params = [
        replace(
            long.params,
            stop=some_stops(llm, long, rng),
            include_stop_str_in_output=bool(rng.integers(2)),
            max_tokens=int(rng.integers(1, 49)),
        )
        for long in chosen
    ]
    llm.engine.set_policy(StaticPolicy(5))
    before = llm.metrics().num_generation_tokens
    outputs = generate(llm, [long.prompt for long in chosen], params)
    llm.engine.set_policy(StaticPolicy(K))
    assert_stopped(llm, outputs, params, chosen)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert llm.metrics().num_generation_tokens - before == num_tokens
    assert_idle(llm)
