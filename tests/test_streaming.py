"""Outputs that grow: each goes on from the one before, and who fails, stops or leaves is alone."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce

import numpy as np
import pytest
from support.scripts import TextScript
from support.texts import simulated_llm, with_bytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specjax import LLM, SamplingParams
from specjax.text.detokenizer import StopStrings
from specjax.text.tokenizer import ChatTokenizer

VOCAB = 96
EOS = 5
MAX_LEN = 64
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HOT = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
SETTINGS = {
    "max_model_len": MAX_LEN,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "decode_batches": None,
    "prefill_shapes": None,
}
LETTERS = [i for i in range(26) if i != EOS]
SCRIPT = TextScript(VOCAB, ids=(*LETTERS, *LETTERS, *range(VOCAB)))


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", eos_token_id=EOS)


@pytest.fixture(scope="module")
def folder(checkpoints, target):
    """The target with a tokenizer of single bytes, few of which are characters by themselves."""
    letters = [pre_tokenizers.ByteLevel().pre_tokenize_str(chr(b))[0][0] for b in range(0x61, 0x7B)]
    rest = [one for one in sorted(pre_tokenizers.ByteLevel.alphabet()) if one not in letters]
    return with_bytes(checkpoints, target.folder, [*letters, *rest[-(VOCAB - len(letters)) :]])


@pytest.fixture(scope="module")
def llm(checkpoints, target, folder):
    head = checkpoints.eagle3(target).folder
    with simulated_llm(folder, "eagle3", model=head, k=2, script=SCRIPT, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(folder):
    """Without speculation, and by priority."""
    options = SETTINGS | {"scheduling_policy": "priority"}
    with simulated_llm(folder, script=SCRIPT, **options) as plain:
        yield plain


def one_each(llm, prompts, params):
    """What each prompt gives by itself."""
    return [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]


def samples(output):
    """All that a user can tell apart, without the number of the request."""
    return list(output.outputs)


def tokens(output):
    return output.outputs[0].token_ids


def run(engine):
    while engine.has_work:
        engine.step()


def is_idle(llm):
    scheduler = llm.engine.scheduler
    is_free = scheduler.pages.num_free == scheduler.pages.num_pages
    return is_free and not scheduler.has_work and len(scheduler.residents.free_slots) > 0


@contextmanager
def patched(target: object, name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


# --- outputs that grow ----------------------------------------------------------------------------

ASKED = {
    "greedy": GREEDY,
    "seeded, with logprobs": dataclasses.replace(HOT, logprobs=1, prompt_logprobs=1),
    "two samples": dataclasses.replace(HOT, n=2, temperature=1.5),
    "without text": dataclasses.replace(GREEDY, detokenize=False),
    "stop ids": dataclasses.replace(HOT, min_tokens=2, stop_token_ids=[*range(20, 28)][:7]),
}


@pytest.mark.parametrize("name", ASKED)
def test_outputs_go_on_from_those_before(llm, ragged_prompts, name):
    params, prompts = ASKED[name], ragged_prompts(3, 1, 37, 9, 18, 30)
    expected = llm.generate(prompts, params, use_tqdm=False)
    outputs: dict[int, list] = {}
    for output in llm.generate_stream(prompts, params):
        outputs.setdefault(output.request_id, []).append(output)
    assert [grown[-1].prompt_token_ids for grown in outputs.values()] == prompts
    for grown, whole in zip(outputs.values(), expected, strict=True):
        assert samples(grown[-1]) == samples(whole)
        assert grown[-1].prompt_logprobs == whole.prompt_logprobs
        assert [output.finished for output in grown] == [False] * (len(grown) - 1) + [True]
        assert len(grown) > 1
        for before, after in zip(grown, grown[1:], strict=False):
            assert_goes_on(before, after)
    assert is_idle(llm)


def assert_goes_on(before, after):
    assert before.request_id == after.request_id
    assert before.prompt_token_ids == after.prompt_token_ids
    for old, new in zip(before.outputs, after.outputs, strict=True):
        count = len(old.token_ids)
        assert new.token_ids[:count] == old.token_ids
        if old.logprobs is not None:
            assert len(old.logprobs) == count and new.logprobs[:count] == old.logprobs
            total = sum(one[t].logprob for t, one in zip(old.token_ids, old.logprobs, strict=True))
            assert old.cumulative_logprob == pytest.approx(total)
        if old.text is not None:
            assert new.text.startswith(old.text), (old.text, new.text)
        if old.finish_reason is not None:
            assert old == new
        else:
            assert old.stop_reason is None and old.error is None


def test_prompts_grow_side_by_side(llm, ragged_prompts):
    prompts = ragged_prompts(4, 5)
    order = [output.request_id for output in llm.generate_stream(prompts, GREEDY)]
    first = {number: order.index(number) for number in order}
    last = {number: len(order) - 1 - order[::-1].index(number) for number in order}
    assert len(first) == 2 and max(first.values()) < min(last.values())


def test_a_text_that_may_become_a_stop_is_held_back(llm):
    """What has been shown is never taken back, wherever the stop text begins."""
    whole = llm.generate([1, 2, 3], HOT, use_tqdm=False)[0].outputs[0]
    text = whole.text
    for start in 2, 7, 11:
        stop = text[start : start + 4]
        for is_included in False, True:
            params = dataclasses.replace(
                HOT, stop=[stop, stop[1:3] + "?"], include_stop_str_in_output=is_included
            )
            grown = list(llm.generate_stream([1, 2, 3], params))
            for before, after in zip(grown, grown[1:], strict=False):
                assert_goes_on(before, after)
            end = text.index(stop) + (len(stop) if is_included else 0)
            assert grown[-1].outputs[0].text == text[:end]
            assert grown[-1].outputs[0].stop_reason == stop
            expected = llm.generate([1, 2, 3], params, use_tqdm=False)[0]
            assert samples(grown[-1]) == samples(expected)
    # A beginning that goes on otherwise comes out, at the latest with the end.
    params = dataclasses.replace(HOT, stop=[text[4] + "?", text[-1] + "?"])
    grown = [output.outputs[0].text for output in llm.generate_stream([1, 2, 3], params)]
    assert grown[-1] == text and any(len(one) > 5 for one in grown[:-1])


def test_half_characters_are_held_back(llm):
    """Of tokens that are bytes, and of byte tokens, one of which may spoil a whole run."""
    rng = np.random.default_rng(0)
    runs = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}, []))
    runs.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fallback = ChatTokenizer(runs, None, {}, "bytes")
    for tokenizer, size in (llm.tokenizer, VOCAB), (fallback, 257):
        for length in range(40):
            ids = rng.integers(0, size, length).tolist()
            if size == 257:
                characters = rng.choice(["a", "é", "語", "🙂"], length)
                ids = [byte for one in characters for byte in one.encode()]
                ids = [*ids, *([0xFF] if length % 3 else [256])]
            watch = StopStrings(tokenizer, ())
            texts = [watch.append([token]) or watch.stable for token in ids]
            texts.append(tokenizer.decode(ids))
            for before, after in zip(texts, texts[1:], strict=False):
                assert after.startswith(before), ids


# --- streams that are left, and calls between -----------------------------------------------------


@pytest.mark.parametrize("num_items", [0, 1, 5])
def test_leaving_early_aborts(llm, ragged_prompts, num_items):
    prompts = ragged_prompts(30, 2, 40, 5, 6, 7)
    expected = [tokens(output) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    before = llm.metrics().requests_finished.get("abort", 0)
    stream = llm.generate_stream(prompts, GREEDY)
    for _ in range(num_items):
        next(stream)
    stream.close()
    assert is_idle(llm)
    if num_items:
        assert llm.metrics().requests_finished["abort"] == before + len(prompts)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [tokens(output) for output in outputs] == expected
    assert not llm.engine.has_work


def test_nothing_starts_before_the_first_item(llm):
    before = llm.metrics()
    stream = llm.generate_stream([1, 2, 3], GREEDY)
    assert llm.metrics() == before and not llm.engine.has_work
    next(stream)
    assert llm.engine.has_work
    stream.close()


def test_calls_between_two_items(llm, ragged_prompts):
    prompts, others = ragged_prompts(3, 9, 20), ragged_prompts(5, 33, 2, seed=1)
    expected = one_each(llm, prompts, HOT)
    expected_others = one_each(llm, others, GREEDY)
    stream = llm.generate_stream(prompts, HOT)
    grown = [next(stream), next(stream)]
    short = dataclasses.replace(GREEDY, max_tokens=5)
    assert (
        tokens(llm.generate(others[0], short, use_tqdm=False)[0]) == tokens(expected_others[0])[:5]
    )
    grown.append(next(stream))
    second = llm.generate_stream(others, GREEDY)
    next(second)
    outputs = llm.generate(others, GREEDY, use_tqdm=False)  # longer than all that was left
    assert [samples(one) for one in outputs] == [samples(one) for one in expected_others]
    last = {output.request_id: output for output in [*grown, *stream]}
    assert [samples(last[number]) for number in sorted(last)] == [samples(one) for one in expected]
    last = {output.request_id: output for output in second}
    assert [samples(last[number]) for number in sorted(last)] == [
        samples(one) for one in expected_others
    ]
    assert is_idle(llm)


@pytest.mark.parametrize(
    "arguments, options, words",
    [
        (([1, VOCAB], GREEDY), {}, "prompt 0.*token id 96"),
        (([[1], []], GREEDY), {}, "prompt 1 is empty"),
        (([[1], [2]], [GREEDY]), {}, "1 entries for 2 prompts"),
        (([1], "greedy"), {}, "SamplingParams"),
        (([1], GREEDY), {"priority": 1}, "scheduling_policy='priority'"),
        (([1], GREEDY), {"priority": [1, 2]}, "2 entries for 1 prompts"),
    ],
    ids=str,
)
def test_errors_come_with_the_call(llm, arguments, options, words):
    with pytest.raises(ValueError, match=words):
        llm.generate_stream(*arguments, **options)
    assert is_idle(llm)


def test_the_lowest_priority_goes_first(plain):
    params = dataclasses.replace(GREEDY, max_tokens=4)
    stream = plain.generate_stream([[1]] * 6, params, priority=[5, 4, 3, 2, 1, -1])
    ended = [output.request_id for output in stream if output.finished]
    assert ended == sorted(ended, reverse=True) and len(ended) == 6


def test_ids_are_those_of_one_request_each(llm):
    one = llm.start(llm.make_request([1, 2], GREEDY, request_id="one"))
    before = llm.metrics().num_requests_waiting
    with pytest.raises(ValueError, match="'one'.*not finished"):
        llm.start(llm.make_request([3], GREEDY, request_id="one"))
    assert llm.metrics().num_requests_waiting == before
    run(llm.engine)
    assert one.is_finished and one.output().request_id == "one"
    again = llm.start(llm.make_request([3], GREEDY, request_id="one"))
    assert llm.engine.abort("one") and not llm.engine.abort("one")
    assert [sample.finish_reason for sample in again.output().outputs] == ["abort"]
    run(llm.engine)


def test_an_id_of_a_user_is_never_given_twice(llm):
    """Requests without an id are numbered, and pass over numbers that users have given."""
    (output,) = llm.generate([1], GREEDY, use_tqdm=False)
    taken = llm.start(llm.make_request([1, 2], GREEDY, request_id=str(int(output.request_id) + 3)))
    outputs = llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False)
    ids = [output.request_id for output in outputs]
    assert len(set(ids)) == 3 and taken.request.request_id not in ids
    run(llm.engine)


def test_requests_are_added_together_or_not_at_all(llm):
    add, calls = llm.engine.add, iter(range(2))

    def fail_at_third(request):
        if next(calls, None) is None:
            raise MemoryError
        return add(request)

    with patched(llm.engine, "add", fail_at_third), pytest.raises(MemoryError):
        llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False)
    assert is_idle(llm)


# --- requests that fail ---------------------------------------------------------------------------


class Watch:
    """Raises at the third token."""

    stop_reason = None
    text = stable = ""
    num_tokens = 0

    def append(self, tokens):
        self.num_tokens += len(tokens)
        if self.num_tokens >= 3:
            raise LookupError("the text is gone")


class Grammar:
    """Raises at the third token, or when asked for masks the third time."""

    is_finished = False

    def __init__(self, has_masks: bool = True):
        self.num_tokens = self.num_asked = 0
        self.has_masks = has_masks

    def accept(self, tokens):
        self.num_tokens += len(tokens)
        if self.has_masks and self.num_tokens >= 3:
            raise LookupError("the grammar is gone")

    def masks(self, drafts):
        self.num_asked += 1
        if not self.has_masks and self.num_asked >= 3:
            raise LookupError("the masks are gone")
        return -1


def add_beside(llm: LLM, params: SamplingParams, change: Callable, prompts: list[list[int]]):
    """Requests by hand, the second of them changed; their samples."""
    requests = [llm.request_maker.make(p, params, i, "x") for i, p in enumerate(prompts)]
    requests[1] = change(requests[1])
    llm.engine.prepare(requests)
    return [llm.engine.add(one)[0] for one in requests]


@pytest.mark.parametrize("name, kind", [("watch_text", Watch), ("follow_grammar", Grammar)])
def test_a_request_that_fails_fails_alone(llm, ragged_prompts, name, kind):
    prompts = ragged_prompts(3, 10, 20, 5, 40)
    expected = [tokens(one) for one in one_each(llm, prompts, GREEDY)]
    before = llm.metrics().requests_finished
    added = add_beside(llm, GREEDY, lambda r: dataclasses.replace(r, **{name: kind}), prompts)
    touched = []
    while llm.engine.has_work:
        touched += llm.engine.step()
    failed = added.pop(1)
    assert failed.finish_reason == "error" and isinstance(failed.error, LookupError)
    assert touched.count(failed) >= 1
    assert failed.output == expected.pop(1)[: failed.num_output] and failed.num_output < 3
    assert [sample.output for sample in added] == expected
    after = llm.metrics().requests_finished
    assert after["error"] - before.get("error", 0) == 1
    assert after["length"] - before["length"] == 4
    assert is_idle(llm)


def test_a_grammar_without_masks_fails_alone(plain, ragged_prompts):
    """It fails while a round of others is on its way."""
    prompts = ragged_prompts(3, 10, 20)
    expected = [tokens(one) for one in one_each(plain, prompts, GREEDY)]

    def change(request):
        params = dataclasses.replace(GREEDY, structured_outputs={"regex": "x"})
        return dataclasses.replace(request, params=params, follow_grammar=lambda: Grammar(False))

    added = add_beside(plain, GREEDY, change, prompts)
    touched = []
    while plain.engine.has_work:
        touched += plain.engine.step()
    assert added[1].finish_reason == "error" and isinstance(added[1].error, LookupError)
    assert added[1] in touched and added[1].output == expected[1][:2]
    assert [added[0].output, added[2].output] == [expected[0], expected[2]]
    assert is_idle(plain)


def test_a_text_that_cannot_be_had_fails_alone(llm, ragged_prompts):
    prompts = ragged_prompts(3, 10, 20)
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    decode, bad = ChatTokenizer.decode, tokens(expected[1])

    def fail_for_one(self, ids):
        if bad[3:5] == list(ids)[-2:] or list(ids)[-len(bad) :] == bad:
            raise LookupError("no such text")
        return decode(self, ids)

    with patched(ChatTokenizer, "decode", fail_for_one):
        whole = llm.generate(prompts, GREEDY, use_tqdm=False)
        grown = list(llm.generate_stream(prompts, GREEDY))
    last = list({output.request_id: output for output in grown}.values())
    for outputs in whole, last:
        assert [samples(outputs[i]) for i in (0, 2)] == [samples(expected[i]) for i in (0, 2)]
        (failed,) = outputs[1].outputs
        assert isinstance(failed.error, LookupError) and failed.token_ids == bad
        assert expected[1].outputs[0].text.startswith(failed.text or "")
    assert is_idle(llm)


@pytest.mark.parametrize(
    "where",
    [
        "_launch",
        "_read",
        "launcher._in_flight",
        "scheduler.commit",
        "scheduler.residents.vacate",
    ],
)
def test_an_interrupt_anywhere_leaves_a_usable_llm(llm, ragged_prompts, where):
    prompts = ragged_prompts(9, 2, 50, 1, 33)
    params = dataclasses.replace(GREEDY, max_tokens=8)
    expected = [tokens(one) for one in llm.generate(prompts, params, use_tqdm=False)]
    *owner, name = where.split(".")
    owner = reduce(getattr, owner, llm.engine)
    for count in 0, 3:
        original, calls = getattr(owner, name), iter(range(count))

        def interrupted(*arguments, original=original, calls=calls):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return original(*arguments)

        stream = llm.generate_stream([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=None))
        next(stream)
        with patched(owner, name, interrupted), pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params, use_tqdm=False)
        assert is_idle(llm)
        assert [one.outputs[0].finish_reason for one in stream] == ["abort"]
        assert [tokens(one) for one in llm.generate(prompts, params, use_tqdm=False)] == expected


def test_a_step_that_fails_leaves_a_usable_llm(llm):
    """An error that is nobody's own ends all there is, and nothing waits for what was lost."""
    expected = tokens(llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0])
    stream = llm.generate_stream([4, 5], GREEDY)
    next(stream)

    def fail(_):
        raise MemoryError

    with patched(llm.engine, "_launch", fail), pytest.raises(MemoryError):
        llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
    assert tokens(llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0]) == expected
    assert [output.outputs[0].finish_reason for output in stream][-1:] == ["abort"]


def test_a_closed_llm_says_so(llm):
    running = llm.generate_stream([[1, 2], [3]], GREEDY)
    not_started = llm.generate_stream([1, 2], GREEDY)
    next(running)
    uses = (
        lambda: llm.generate_stream([1]),
        lambda: llm.make_request([1], GREEDY),
        lambda: next(not_started),
        lambda: list(running),
    )
    try:
        with patched(llm, "_is_closed", True):
            for use in uses:
                with pytest.raises(RuntimeError, match="closed"):
                    use()
    finally:
        llm.engine.reset()
