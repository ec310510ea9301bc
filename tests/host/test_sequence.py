"""The state of a new sequence, and the ways in which its output ends.

`tests/fuzz` checks how outputs grow, and how texts, grammars and errors end them.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from specjax.host.request import Request
from specjax.host.residency import Residency
from specjax.host.sequence import RowOutput, Sequence
from specjax.outputs import Logprob
from specjax.sampling_params import SamplingParams

EOS, STOP = 5, 7
PROMPT = (1, 2, 3)


@dataclass
class Ending:
    """A watch of stop texts, or a grammar, that is complete after the token `last`."""

    last: int
    seen: list[int] = field(default_factory=list)
    dead_end = None

    @property
    def is_finished(self):
        return self.last in self.seen

    @property
    def stop_reason(self):
        return f"text of {self.last}"

    def accept(self, tokens):
        self.seen += tokens

    def append(self, tokens):
        self.seen += tokens
        return 1 if self.is_finished else None


def make_sequence(max_tokens=8, *, watch=None, matcher=None, priority=0, arrival=4, **params):
    params = SamplingParams(stop_token_ids=[STOP], **params)
    request = Request(
        0,
        PROMPT,
        params,
        max_tokens,
        (0, 1, 2),
        (EOS, STOP),
        priority=priority,
        watch_text=watch and (lambda: Ending(watch)),
        follow_grammar=matcher and (lambda: Ending(matcher)),
    )
    return Sequence.of(request, 1, arrival)


def logprobs_of(tokens):
    return [{token: Logprob(-float(token), 1)} for token in tokens]


def end(sequence):
    return sequence.is_finished, sequence.finish_reason, sequence.stop_reason


@pytest.mark.parametrize("output", [(), (4, 6)])
def test_what_is_there_already_has_been_seen(output):
    """If an output continues, the watch and the grammar get its earlier tokens at the start."""
    calls = []
    seer = SimpleNamespace(append=calls.append, accept=calls.append)
    fields = {"watch_text": lambda: seer, "follow_grammar": lambda: seer}
    request = Request(0, PROMPT, SamplingParams(), 8, (0,), output_token_ids=output, **fields)
    sequence = Sequence.of(request, 0, 0)
    assert sequence.token_ids == [*PROMPT, *output] and sequence.output == [*output]
    assert calls == ([output, output] if output else [])


@pytest.mark.parametrize(
    "wanted, fields, most",
    [
        (None, {}, 5),
        (0, {}, 0),
        (None, {"is_scored": True}, 2),
        (None, {"exports_features": True}, 0),
    ],
)
def test_nothing_that_is_reported_on_is_taken_from_the_prefix_cache(wanted, fields, most):
    params = SamplingParams(prompt_logprobs=wanted)
    request = Request(0, PROMPT, params, 8, (0,), output_token_ids=(4, 6), **fields)
    assert Sequence.of(request, 0, 0).max_found == most


def test_the_first_admission_is_noted():
    sequence = make_sequence()
    sequence.admit(Residency(slot=2, num_to_prefill=3, num_computed=1))
    first = sequence.num_cached_tokens, sequence.scheduled_ts
    sequence.admit(Residency(slot=0, num_to_prefill=3, num_computed=2))
    assert sequence.residency.slot == 0 and first[0] == 1
    assert first == (sequence.num_cached_tokens, sequence.scheduled_ts)


@pytest.mark.parametrize(
    "last, reason", [(EOS, None), (STOP, STOP)], ids=["end-of-sequence", "stop-token-id"]
)
@pytest.mark.parametrize("max_tokens", [3, 8])
def test_a_stop_id_ends_an_output_even_at_its_full_length(last, reason, max_tokens):
    sequence = make_sequence(max_tokens)
    assert sequence.append(RowOutput([10, 11, last])) == 3
    assert sequence.output == [10, 11, last]
    assert end(sequence) == (True, "stop", reason)


@pytest.mark.parametrize("last", [EOS, STOP, 10])
def test_a_text_comes_before_other_ends_on_the_same_token(last):
    """A stop token has no text in which a stop text could end, unless the output includes it."""
    for includes in True, False:
        options = {"include_stop_str_in_output": includes}
        sequence = make_sequence(max_tokens=2, watch=last, matcher=last, **options)
        sequence.append(RowOutput([20, last]))
        is_found = includes or last == 10
        reason = f"text of {last}" if is_found else {EOS: None, STOP: STOP}[last]
        assert end(sequence) == (True, "stop", reason)
        assert sequence.watch.seen == [20, last][: 1 + is_found]
        assert sequence.hides_last == (not is_found)


def test_an_error_since_the_last_step_ends_the_output():
    sequence = make_sequence()
    sequence.error = error = RuntimeError("not in the grammar")
    assert sequence.append(RowOutput([10, 11, 12])) == 0 == sequence.num_output
    assert end(sequence) == (True, "error", None) and sequence.error is error


RULED_OUT = {"min_tokens": 5, "bad_words": ["a"]}


@pytest.mark.parametrize("before", [[], [10, 11]])
@pytest.mark.parametrize(
    "params, error, words",
    [
        (RULED_OUT, ValueError, "by bad_words, min_tokens=5; relax one"),
        ({"allowed_token_ids": [3]}, ValueError, "by allowed_token_ids; relax one"),
        ({}, RuntimeError, "logits are NaN"),
    ],
)
def test_where_no_token_is_left_the_output_ends_before_it(before, params, error, words):
    """The device returns -1 for the missing token, with meaningless log-probabilities."""
    sequence, row = make_sequence(logprobs=0, **params), [*before, -1]
    assert sequence.append(RowOutput([20], logprobs=logprobs_of([20]))) == 1
    assert sequence.append(RowOutput(row, len(before), logprobs_of(row))) == len(before)
    assert sequence.output == [20, *before] and sequence.logprobs == logprobs_of([20, *before])
    assert end(sequence) == (True, "error", None)
    assert isinstance(sequence.error, error) and words in str(sequence.error)
    assert f"follow the {1 + len(before)} tokens" in str(sequence.error)


def test_a_text_that_ends_before_no_token_is_left_has_ended():
    sequence = make_sequence(watch=11, allowed_token_ids=[3])
    assert sequence.append(RowOutput([10, 11, -1])) == 2
    assert end(sequence) == (True, "stop", "text of 11") and sequence.error is None


def test_a_grammar_that_ends_too_early_for_min_tokens_is_an_error():
    """The model has no end-of-sequence token, so nothing else would detect this."""
    sequence = make_sequence(matcher=12, min_tokens=3, structured_outputs={"choice": ["a"]})
    assert sequence.append(RowOutput([10, 12])) == 2 and end(sequence) == (True, "error", None)
    assert "structured_outputs, min_tokens=3" in str(sequence.error)


def test_chunks_that_are_run_again_bring_the_prompts_logprobs_once():
    """After a preemption, chunks may have other borders. The last chunk samples a token."""
    sequence = make_sequence(prompt_logprobs=0)
    first, both = logprobs_of(PROMPT[1:2]), logprobs_of(PROMPT[1:])
    for told in first, both:
        sequence.append(RowOutput([], prompt_logprobs=told, start=0))
    sequence.append(RowOutput([11], prompt_logprobs=[], start=2))
    assert sequence.prompt_logprobs == [None, *both]


def test_drafts_after_the_end_are_not_rejected():
    sequence = make_sequence()
    for row, counted in ([10, 11], 3), ([12, STOP], 1):
        assert sequence.num_usable(3, sequence.append(RowOutput(row))) == counted
