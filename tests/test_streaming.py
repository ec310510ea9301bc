"""Growing outputs: each continues the one before, and other requests are not disturbed.

A request may fail, stop or be left by its reader.
"""

from dataclasses import replace
from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
from support.engines import ANY_SHAPES, assert_idle, generate, generate_tokens, patched
from support.scripts import TextScript
from support.texts import simulated_llm, with_bytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specjax import LLM, SamplingParams
from specjax.text.detokenizer import StopStrings
from specjax.text.tokenizer import ChatTokenizer

VOCAB, EOS = 96, 5
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HOT = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
SETTINGS = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    **ANY_SHAPES,
}
LETTERS = [i for i in range(26) if i != EOS]
SCRIPT = TextScript(VOCAB, ids=(*LETTERS, *LETTERS, *range(VOCAB)))


@pytest.fixture(scope="module")
def folder(checkpoints):
    """A target with a tokenizer of single bytes, most of which are only parts of characters."""
    letters = [pre_tokenizers.ByteLevel().pre_tokenize_str(chr(b))[0][0] for b in range(0x61, 0x7B)]
    rest = [one for one in sorted(pre_tokenizers.ByteLevel.alphabet()) if one not in letters]
    letters += rest[len(letters) - VOCAB :]
    return with_bytes(checkpoints, checkpoints.target("llama", eos_token_id=EOS).folder, letters)


@pytest.fixture(scope="module")
def llm(folder):
    with simulated_llm(folder, "ngram", k=2, script=SCRIPT, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(folder):
    """An LLM without speculation, which schedules by priority."""
    options = SETTINGS | {"scheduling_policy": "priority"}
    with simulated_llm(folder, script=SCRIPT, **options) as plain:
        yield plain


def grown(llm, prompts, params):
    """Return the list of streamed outputs of each request."""
    found: dict[str, list] = {}
    for output in llm.generate_stream(prompts, params):
        found.setdefault(output.request_id, []).append(output)
    return list(found.values())


def run(engine):
    """Run the engine until it is idle; return all samples that grew or ended, step by step."""
    touched = []
    while engine.has_work:
        touched += engine.step()
    return touched


# --- outputs that grow ----------------------------------------------------------------------------

ASKED = {
    "greedy": GREEDY,
    "seeded, with logprobs": replace(HOT, logprobs=1, prompt_logprobs=1),
    "two samples": replace(HOT, n=2, temperature=1.5),
    "without text": replace(GREEDY, detokenize=False),
    "stop ids": replace(HOT, min_tokens=2, stop_token_ids=[*range(20, 27)]),
}


@pytest.mark.parametrize("name", ASKED)
def test_outputs_go_on_from_those_before(llm, ragged_prompts, name):
    params, prompts = ASKED[name], ragged_prompts(3, 1, 37, 9, 18, 30)
    expected = generate(llm, prompts, params)
    for outputs, whole in zip(grown(llm, prompts, params), expected, strict=True):
        last = outputs[-1]
        assert (last.outputs, last.prompt_logprobs) == (whole.outputs, whole.prompt_logprobs)
        assert last.prompt_token_ids == whole.prompt_token_ids
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert len(outputs) > 1
        assert_go_on(outputs)
    assert_idle(llm)


def assert_go_on(outputs):
    for before, after in pairwise(outputs):
        assert before.request_id == after.request_id
        assert before.prompt_token_ids == after.prompt_token_ids
        for old, new in zip(before.outputs, after.outputs, strict=True):
            count = len(old.token_ids)
            assert new.token_ids[:count] == old.token_ids
            if old.logprobs is not None:
                assert len(old.logprobs) == count and new.logprobs[:count] == old.logprobs
                pairs = zip(old.token_ids, old.logprobs, strict=True)
                total = sum(one[token].logprob for token, one in pairs)
                assert old.cumulative_logprob == pytest.approx(total)
            if old.text is not None:
                assert new.text.startswith(old.text), (old.text, new.text)
            if old.finish_reason is not None:
                assert old == new
            else:
                assert old.stop_reason is None and old.error is None


def test_prompts_grow_side_by_side(llm, ragged_prompts):
    stream = llm.generate_stream(ragged_prompts(4, 5), GREEDY)
    order = [int(output.request_id) for output in stream]
    assert order != sorted(order)


def test_a_text_that_may_become_a_stop_is_held_back(llm):
    """Text that was shown is never taken back, wherever a stop text begins."""
    text = generate(llm, [1, 2, 3], HOT)[0].outputs[0].text
    for start in 2, 7, 11:
        stop = text[start : start + 4]
        for is_included in False, True:
            params = replace(
                HOT, stop=[stop, stop[1:3] + "?"], include_stop_str_in_output=is_included
            )
            (outputs,) = grown(llm, [1, 2, 3], params)
            assert_go_on(outputs)
            (sample,) = outputs[-1].outputs
            assert sample.text == text[: text.index(stop) + len(stop) * is_included]
            assert sample.stop_reason == stop
            assert generate(llm, [1, 2, 3], params)[0].outputs == [sample]
    # A beginning that goes on otherwise comes out, at the latest with the end.
    params = replace(HOT, stop=[text[4] + "?", text[-1] + "?"])
    texts = [output.outputs[0].text for output in llm.generate_stream([1, 2, 3], params)]
    assert texts[-1] == text and any(len(one) > 5 for one in texts[:-1])


def test_half_characters_are_held_back(llm):
    """Tokens are bytes, or SentencePiece's byte tokens, of which one can make a run invalid."""
    rng = np.random.default_rng(0)
    runs = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}, []))
    runs.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fallback = ChatTokenizer(runs, None, {}, "bytes")
    for tokenizer in llm.tokenizer, fallback:
        for length in range(40):
            ids = rng.integers(0, VOCAB, length).tolist()
            if tokenizer is fallback:
                text = "".join(rng.choice(["a", "é", "語", "🙂"], length))
                ids = [*text.encode(), 0xFF if length % 3 else 256]
            watch = StopStrings(tokenizer, ())
            texts = [watch.append([token]) or watch.stable for token in ids]
            for before, after in pairwise([*texts, tokenizer.decode(ids)]):
                assert after.startswith(before), ids


# --- streams that are left, and calls between -----------------------------------------------------


@pytest.mark.parametrize("num_items", [0, 1, 5])
def test_leaving_early_aborts_what_has_begun(llm, ragged_prompts, num_items):
    prompts = ragged_prompts(30, 2, 40, 5, 6, 7)
    expected = generate_tokens(llm, prompts, GREEDY)
    before = llm.metrics()
    stream = llm.generate_stream(prompts, GREEDY)
    assert llm.metrics() == before and not llm.engine.has_work
    for _ in range(num_items):
        next(stream)
    assert llm.engine.has_work == (num_items > 0)
    stream.close()
    scheduler = llm.engine.scheduler
    assert scheduler.pages.num_free == scheduler.pages.num_pages and not scheduler.has_work
    aborted = [m.requests_finished.get("abort", 0) for m in (before, llm.metrics())]
    assert aborted[1] - aborted[0] == len(prompts) * (num_items > 0)
    assert generate_tokens(llm, prompts, GREEDY) == expected
    assert_idle(llm)


def test_calls_between_two_items(llm, ragged_prompts):
    prompts, others = ragged_prompts(3, 9, 20), ragged_prompts(5, 33, 2, seed=1)

    def alone(prompts, params):
        return [generate(llm, prompt, params)[0].outputs for prompt in prompts]

    def last(outputs):
        found = {output.request_id: output.outputs for output in outputs}
        return [found[number] for number in sorted(found)]

    expected, expected_others = alone(prompts, HOT), alone(others, GREEDY)
    stream = llm.generate_stream(prompts, HOT)
    items = [next(stream), next(stream)]
    (short,) = generate_tokens(llm, others[0], replace(GREEDY, max_tokens=5))
    assert short == expected_others[0][0].token_ids[:5]
    items.append(next(stream))
    second = llm.generate_stream(others, GREEDY)
    next(second)
    outputs = generate(llm, others, GREEDY)  # longer than all that was left
    assert [output.outputs for output in outputs] == expected_others
    assert last([*items, *stream]) == expected
    assert last(second) == expected_others
    assert_idle(llm)


def test_a_stream_left_after_its_end_is_no_abort_of_another_with_the_name(llm):
    stream = llm.generate_stream([1, 2, 3], GREEDY)
    name = next(stream).request_id
    generate(llm, [1], replace(GREEDY, max_tokens=None))  # which runs the other to its end as well
    second = llm.start(llm.make_request([4, 5], GREEDY, request_id=name))
    stream.close()
    run(llm.engine)
    assert second.output().outputs[0].finish_reason == "length"


def test_the_lowest_priority_goes_first(plain):
    params = replace(GREEDY, max_tokens=4)
    stream = plain.generate_stream([[1]] * 6, params, priority=[5, 4, 3, 2, 1, -1])
    ended = [output.request_id for output in stream if output.finished]
    assert ended == sorted(ended, reverse=True) and len(ended) == 6


def test_ids_are_those_of_one_request_each(llm):
    """Requests without an id are numbered, without the numbers that users gave as ids."""
    (output,) = generate(llm, [1], GREEDY)
    name = str(int(output.request_id) + 3)
    one = llm.start(llm.make_request([1, 2], GREEDY, request_id=name))
    before = llm.metrics().num_requests_waiting
    with pytest.raises(ValueError, match=f"{name!r}.*not finished"):
        llm.start(llm.make_request([3], GREEDY, request_id=name))
    assert llm.metrics().num_requests_waiting == before
    ids = [output.request_id for output in generate(llm, [[1], [2], [3]], GREEDY)]
    ids.append(llm.make_request([1], GREEDY).request_id)
    assert len({name, *ids}) == 5
    run(llm.engine)
    assert one.is_finished and one.output().request_id == name
    again = llm.start(llm.make_request([3], GREEDY, request_id=name))
    assert llm.engine.abort(name) and not llm.engine.abort(name)
    assert [sample.finish_reason for sample in again.output().outputs] == ["abort"]
    run(llm.engine)


# --- requests that fail ---------------------------------------------------------------------------


class Failing:
    """A watch or grammar that raises at the third token, or at the third request for masks.

    Meanwhile, a round of other requests is in flight.
    """

    stop_reason, text, stable, is_finished = None, "", "", False

    def __init__(self, by_tokens: bool = True):
        self.by_tokens, self.count = by_tokens, 0

    def append(self, tokens):
        self.note(len(tokens) * self.by_tokens)

    accept = append

    def masks(self, drafts):
        self.note(not self.by_tokens)
        return -1

    def note(self, count):
        self.count += count
        if self.count >= 3:
            raise LookupError("it is gone")


@pytest.mark.parametrize(
    "which, name, by_tokens",
    [
        ("llm", "watch_text", True),
        ("llm", "follow_grammar", True),
        ("plain", "follow_grammar", False),
    ],
)
def test_a_request_that_fails_fails_alone(request, ragged_prompts, which, name, by_tokens):
    llm: LLM = request.getfixturevalue(which)
    prompts = ragged_prompts(3, 10, 20, 5, 40)
    expected = generate_tokens(llm, prompts, GREEDY)
    before = llm.metrics().requests_finished
    requests = [llm.request_maker.make(p, GREEDY, i, "x") for i, p in enumerate(prompts)]
    requests[1] = replace(requests[1], **{name: lambda: Failing(by_tokens)})
    if not by_tokens:
        params = replace(GREEDY, structured_outputs={"regex": "x"})
        requests[1] = replace(requests[1], params=params)
    llm.engine.prepare(requests)
    added = [llm.engine.add(one)[0] for one in requests]
    touched = run(llm.engine)
    failed = added.pop(1)
    assert failed.finish_reason == "error" and isinstance(failed.error, LookupError)
    assert failed in touched
    assert failed.output == expected.pop(1)[: failed.num_output] and failed.num_output < 3
    assert by_tokens or failed.num_output == 2
    assert [sample.output for sample in added] == expected
    after = llm.metrics().requests_finished
    assert after["error"] - before.get("error", 0) == 1
    assert after["length"] - before["length"] == 4
    assert_idle(llm)


def test_a_text_that_cannot_be_had_fails_alone(llm, ragged_prompts):
    prompts = ragged_prompts(3, 10, 20)
    expected = generate(llm, prompts, GREEDY)
    decode, bad = ChatTokenizer.decode, expected[1].outputs[0].token_ids

    def fail_for_one(self, ids):
        if bad[3:5] == list(ids)[-2:] or list(ids)[-len(bad) :] == bad:
            raise LookupError("no such text")
        return decode(self, ids)

    with patched(ChatTokenizer, "decode", fail_for_one):
        whole = generate(llm, prompts, GREEDY)
        last = [outputs[-1] for outputs in grown(llm, prompts, GREEDY)]
    for outputs in whole, last:
        assert [outputs[i].outputs for i in (0, 2)] == [expected[i].outputs for i in (0, 2)]
        (failed,) = outputs[1].outputs
        assert isinstance(failed.error, LookupError) and failed.token_ids == bad
        assert expected[1].outputs[0].text.startswith(failed.text or "")
    assert_idle(llm)


def fail_at(owner, name, count, error):
    """Make a method raise `error` after `count` calls, inside a `with` block."""
    original, calls = getattr(owner, name), iter(range(count))

    def failing(*arguments):
        if next(calls, None) is None:
            raise error
        return original(*arguments)

    return patched(owner, name, failing)


def test_requests_are_added_together_or_not_at_all(llm):
    with fail_at(llm.engine, "add", 2, MemoryError), pytest.raises(MemoryError):
        generate(llm, [[1], [2], [3]], GREEDY)
    assert_idle(llm)


@pytest.mark.parametrize(
    "where, error",
    [
        ("_launch", KeyboardInterrupt),
        ("_read", KeyboardInterrupt),
        ("launcher._in_flight", KeyboardInterrupt),
        ("scheduler.commit", KeyboardInterrupt),
        ("scheduler.residents.vacate", KeyboardInterrupt),
        ("_launch", MemoryError),
    ],
)
def test_an_interrupt_or_error_anywhere_leaves_a_usable_llm(llm, ragged_prompts, where, error):
    """All requests end, and nothing waits for lost results."""
    prompts, params = ragged_prompts(9, 2, 50, 1, 33), replace(GREEDY, max_tokens=8)
    expected = generate_tokens(llm, prompts, params)
    *owner, name = where.split(".")
    owner = reduce(getattr, owner, llm.engine)
    for count in 0, 3:
        stream = llm.generate_stream([1, 2, 3], replace(GREEDY, max_tokens=None))
        next(stream)
        with fail_at(owner, name, count, error), pytest.raises(error):
            generate(llm, prompts, params)
        if error is KeyboardInterrupt:
            assert_idle(llm)
        assert [one.outputs[0].finish_reason for one in stream][-1:] == ["abort"]
        assert generate_tokens(llm, prompts, params) == expected
        assert_idle(llm)
