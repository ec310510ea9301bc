"""How a sequence grows, what it owns while it is in residence, and how its output ends."""

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
class EndingWatch:
    """Finds its text complete with one token."""

    last: int
    seen: list[int] = field(default_factory=list)
    stop_reason: str | None = None

    def append(self, tokens):
        assert self.stop_reason is None, "it was shown more after it had stopped"
        for i, token in enumerate(tokens, start=1):
            self.seen.append(token)
            if token == self.last:
                self.stop_reason = f"text of {token}"
                return i
        return None


@dataclass
class EndingMatcher:
    """Finished with one token."""

    last: int
    seen: list[int] = field(default_factory=list)

    @property
    def is_finished(self):
        return self.last in self.seen

    def accept(self, tokens):
        assert not self.is_finished, "it was shown more after it had finished"
        self.seen += tokens

    def masks(self, drafts):
        raise AssertionError("nobody asked for masks")


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
        watch_text=watch and (lambda: EndingWatch(watch)),
        follow_grammar=matcher and (lambda: EndingMatcher(matcher)),
    )
    return Sequence.of(request, 1, arrival)


def logprobs_of(tokens):
    return [{token: Logprob(-float(token), 1)} for token in tokens]


def end(sequence):
    return sequence.is_finished, sequence.finish_reason, sequence.stop_reason


def test_a_new_sequence_has_everything_before_it():
    sequence = make_sequence()
    assert (sequence.index, sequence.arrival, sequence.residency) == (1, 4, None)
    assert sequence.token_ids == [1, 2, 3] and sequence.num_prompt_tokens == 3
    assert sequence.output == sequence.logprobs == [] and sequence.num_output == 0
    assert end(sequence) == (False, None, None)
    assert sequence.watch is None and sequence.matcher is None
    assert sequence.prompt_logprobs == [None] * 3


def test_every_sample_is_watched_by_itself():
    request = make_sequence(watch=9, matcher=9).request
    first, second = (Sequence.of(request, index, 0) for index in range(2))
    first.append(RowOutput([9]))
    assert first.is_finished and first.token_ids == [*PROMPT, 9]
    assert not second.is_finished and second.watch.seen == second.matcher.seen == []


@pytest.mark.parametrize("output", [(), (4, 6)])
def test_what_is_there_already_has_been_seen(output):
    """Of an output that goes on; of one that has not begun there is nothing to see."""
    calls = []
    seer = SimpleNamespace(append=calls.append, accept=calls.append)
    fields = {"watch_text": lambda: seer, "follow_grammar": lambda: seer}
    request = Request(0, PROMPT, SamplingParams(), 8, (0,), output_token_ids=output, **fields)
    sequence = Sequence.of(request, 0, 0)
    assert sequence.token_ids == [*PROMPT, *output] and sequence.output == [*output]
    assert calls == ([output, output] if output else [])


@pytest.mark.parametrize(
    "fields, most", [({}, 5), ({"is_scored": True}, 2), ({"exports_features": True}, 0)]
)
def test_nothing_that_is_reported_on_is_taken_from_the_prefix_cache(fields, most):
    request = Request(0, PROMPT, SamplingParams(), 8, (0,), output_token_ids=(4, 6), **fields)
    assert Sequence.of(request, 0, 0).max_found == most


# --- residence ------------------------------------------------------------------------------------


def test_the_first_admission_is_noted():
    sequence = make_sequence()
    sequence.admit(Residency(slot=2, num_to_prefill=3, num_computed=1))
    first = sequence.num_cached_tokens, sequence.scheduled_ts
    sequence.admit(Residency(slot=0, num_to_prefill=3, num_computed=2))
    assert sequence.residency.slot == 0 and first[0] == 1
    assert first == (sequence.num_cached_tokens, sequence.scheduled_ts)


@pytest.mark.parametrize("max_tokens", [3, 4])
def test_what_is_in_flight_gives_a_token_each_at_least(max_tokens):
    sequence = make_sequence(max_tokens)
    sequence.token_ids += [10]
    sequence.num_in_flight = 2
    assert sequence.may_go_on == (max_tokens > 3) and sequence.min_length == 6


def test_the_lowest_priority_value_goes_first_then_the_first_come_then_its_first_sample():
    """Two samples may be equal in everything, and are not the same."""
    ranks = [(1, 0), (0, 2), (-1, 3), (0, 1)]
    sequences = [make_sequence(priority=p, arrival=a) for p, a in ranks]
    assert [(s.request.priority, s.arrival) for s in sorted(sequences)] == sorted(ranks)
    samples = [Sequence.of(sequences[0].request, index, 0) for index in (2, 0, 1)]
    assert [s.index for s in sorted(samples)] == [0, 1, 2]
    assert make_sequence() != make_sequence()


# --- output ---------------------------------------------------------------------------------------


def test_an_output_grows_step_by_step_to_its_length():
    sequence = make_sequence(max_tokens=5)
    assert sequence.append(RowOutput([10])) == 1
    assert sequence.append(RowOutput([11, 12, 13])) == 3
    assert end(sequence) == (False, None, None)
    assert sequence.append(RowOutput([14])) == 1
    assert sequence.output == [10, 11, 12, 13, 14] and sequence.num_output == 5
    assert sequence.token_ids == [*PROMPT, 10, 11, 12, 13, 14]
    assert end(sequence) == (True, "length", None)


@pytest.mark.parametrize(
    "last, reason", [(EOS, None), (STOP, STOP)], ids=["end-of-sequence", "stop-token-id"]
)
@pytest.mark.parametrize("max_tokens", [3, 8])
def test_a_stop_id_ends_an_output_even_at_its_full_length(last, reason, max_tokens):
    sequence = make_sequence(max_tokens)
    assert sequence.append(RowOutput([10, 11, last])) == 3
    assert sequence.output == [10, 11, last]
    assert end(sequence) == (True, "stop", reason)


@pytest.mark.parametrize("place", range(4))
def test_a_text_may_end_anywhere_in_what_a_step_gave(place):
    """Nothing after it stands, and nothing after it is taken for a log-probability or a match."""
    tokens = [10, 11, 12, 13]
    sequence = make_sequence(watch=tokens[place], matcher=99, logprobs=0)
    assert sequence.append(RowOutput([20], logprobs=logprobs_of([20]))) == 1
    assert sequence.append(RowOutput(tokens, 3, logprobs_of(tokens))) == place + 1
    stands = [20, *tokens[: place + 1]]
    assert sequence.output == stands == sequence.matcher.seen
    assert sequence.logprobs == logprobs_of(stands)
    assert end(sequence) == (True, "stop", f"text of {tokens[place]}")


@pytest.mark.parametrize("last", [EOS, STOP, 10])
def test_a_text_comes_before_other_ends_on_the_same_token(last):
    """A stop token has no text for a stop text to end in, unless it is included."""
    for includes in True, False:
        options = {"include_stop_str_in_output": includes}
        sequence = make_sequence(max_tokens=2, watch=last, matcher=last, **options)
        sequence.append(RowOutput([20, last]))
        is_found = includes or last == 10
        reason = f"text of {last}" if is_found else {EOS: None, STOP: STOP}[last]
        assert end(sequence) == (True, "stop", reason)
        assert sequence.watch.seen == [20, last][: 1 + is_found]
        assert sequence.hides_last == (not is_found)


@pytest.mark.parametrize("max_tokens", [2, 8])
def test_a_grammar_ends_an_output(max_tokens):
    """Drafts are checked one by one, and those past the end are no concern of the matcher."""
    sequence = make_sequence(max_tokens, matcher=11, logprobs=0)
    assert sequence.append(RowOutput([10], logprobs=logprobs_of([10]))) == 1
    assert end(sequence) == (False, None, None)
    assert sequence.append(RowOutput([11, 12, 13], 2, logprobs_of([11, 12, 13]))) == 1
    assert sequence.output == sequence.matcher.seen == [10, 11]
    assert sequence.logprobs == logprobs_of([10, 11])
    assert end(sequence) == (True, "stop", None)


@pytest.mark.parametrize("kind", ["matcher", "watch", "since the last step"])
def test_an_error_ends_the_output_before_the_token(kind):
    sequence, error = make_sequence(), RuntimeError("not in the grammar")

    def accept(tokens):
        if tokens == [11]:
            raise error

    if kind == "matcher":
        sequence.matcher = SimpleNamespace(accept=accept, is_finished=False)
    elif kind == "watch":
        sequence.watch = SimpleNamespace(append=accept)
    else:
        sequence.error = error
    assert sequence.append(RowOutput([10, 11, 12])) == (kind in ("matcher", "watch"))
    assert sequence.output == ([10] if kind in ("matcher", "watch") else [])
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
    """The device has -1 in its place, and log-probabilities that mean nothing."""
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
    """Of a model without ends of sequence, where nothing else tells."""
    sequence = make_sequence(matcher=12, min_tokens=3, structured_outputs={"choice": ["a"]})
    sequence.matcher.dead_end = None
    assert sequence.append(RowOutput([10, 12])) == 2 and end(sequence) == (True, "error", None)
    assert "structured_outputs, min_tokens=3" in str(sequence.error)


# --- log-probabilities of the prompt --------------------------------------------------------------


def test_chunks_before_a_prompts_last_only_bring_its_logprobs():
    sequence = make_sequence(watch=10, matcher=10, prompt_logprobs=0)
    first, second = logprobs_of(PROMPT[1:2]), logprobs_of(PROMPT[2:])
    assert sequence.append(RowOutput([], prompt_logprobs=first, start=0)) == 0
    assert sequence.output == sequence.watch.seen == sequence.matcher.seen == []
    assert end(sequence) == (False, None, None)
    assert sequence.append(RowOutput([11], prompt_logprobs=second, start=1)) == 1
    assert sequence.prompt_logprobs == [None, *first, *second]


def test_chunks_that_are_run_again_bring_the_same_logprobs_once():
    """After a preemption; chunks may be cut elsewhere the second time, and end in one token."""
    sequence = make_sequence(prompt_logprobs=0)
    first, both = logprobs_of(PROMPT[1:2]), logprobs_of(PROMPT[1:])
    for told in first, both:
        sequence.append(RowOutput([], prompt_logprobs=told, start=0))
    sequence.append(RowOutput([11], prompt_logprobs=[], start=2))
    assert sequence.prompt_logprobs == [None, *both]
