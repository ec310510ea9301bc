"""How an output grows and ends: by its text, a stop id, its grammar or its length."""

from dataclasses import dataclass, field

import pytest

from specjax.host.sequence import RowOutput, Sequence
from specjax.request import Logprob, Request
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
        self.seen += tokens

    def masks(self, drafts):
        raise AssertionError("nobody asked for masks")


def make_sequence(max_tokens=8, *, watch=None, matcher=None, **params):
    params = SamplingParams(stop_token_ids=[STOP], **params)
    request = Request(
        0,
        PROMPT,
        params,
        max_tokens,
        (0, 1, 2),
        (EOS, STOP),
        watch_text=watch and (lambda: EndingWatch(watch)),
        follow_grammar=matcher and (lambda: EndingMatcher(matcher)),
    )
    return Sequence.of(request, 1, 4, [8, 9])


def logprobs_of(tokens):
    return [{token: Logprob(-float(token), 1)} for token in tokens]


def end(sequence):
    return sequence.is_finished, sequence.finish_reason, sequence.stop_reason


def test_a_new_sequence_has_everything_before_it():
    sequence = make_sequence()
    assert (sequence.index, sequence.slot, sequence.pages) == (1, 4, [8, 9])
    assert not sequence.is_prefilled and not sequence.was_planned
    assert (
        sequence.output == [] and sequence.logprobs == [] and end(sequence) == (False, None, None)
    )
    assert sequence.watch is None and sequence.matcher is None
    assert sequence.prompt_logprobs == [None], "nothing is said of the first token"
    sequence.num_prefilled = len(PROMPT)
    assert sequence.is_prefilled


def test_every_sample_is_watched_by_itself():
    made = []

    def watch():
        made.append(EndingWatch(9))
        return made[-1]

    def matcher():
        made.append(EndingMatcher(9))
        return made[-1]

    params = SamplingParams()
    request = Request(0, PROMPT, params, 8, (0, 1), watch_text=watch, follow_grammar=matcher)
    first, second = (Sequence.of(request, index, index, []) for index in range(2))
    assert made == [first.watch, first.matcher, second.watch, second.matcher]
    assert first.watch is not second.watch and first.matcher is not second.matcher
    first.append(RowOutput([9]))
    assert first.is_finished and not second.is_finished and second.watch.seen == []


def test_an_output_grows_step_by_step_to_its_length():
    sequence = make_sequence(max_tokens=5)
    assert sequence.append(RowOutput([10])) == 1
    assert sequence.append(RowOutput([11, 12, 13])) == 3
    assert end(sequence) == (False, None, None)
    assert sequence.append(RowOutput([14])) == 1
    assert sequence.output == [10, 11, 12, 13, 14]
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
    assert sequence.append(RowOutput([20], logprobs_of([20]))) == 1
    assert sequence.append(RowOutput(tokens, logprobs_of(tokens))) == place + 1
    stands = [20, *tokens[: place + 1]]
    assert sequence.output == stands == sequence.matcher.seen
    assert sequence.logprobs == logprobs_of(stands)
    assert end(sequence) == (True, "stop", f"text of {tokens[place]}")


@pytest.mark.parametrize("last", [EOS, STOP, 10])
def test_a_text_comes_before_other_ends_on_the_same_token(last):
    sequence = make_sequence(max_tokens=2, watch=last, matcher=last)
    sequence.append(RowOutput([20, last]))
    assert end(sequence) == (True, "stop", f"text of {last}")


def test_a_watch_that_finds_nothing_changes_nothing():
    sequence = make_sequence(max_tokens=4, watch=99)
    assert sequence.append(RowOutput([10, 11])) == 2 and end(sequence) == (False, None, None)
    assert sequence.append(RowOutput([12, STOP])) == 2 and end(sequence) == (True, "stop", STOP)
    assert sequence.watch.seen == [10, 11, 12, STOP]


def test_a_grammar_ends_an_output():
    sequence = make_sequence(max_tokens=3, matcher=12)
    sequence.append(RowOutput([10, 11]))
    assert end(sequence) == (False, None, None)
    sequence.append(RowOutput([12]))
    assert sequence.matcher.seen == [10, 11, 12]
    assert end(sequence) == (True, "stop", None)


def test_chunks_before_a_prompts_last_only_bring_its_logprobs():
    sequence = make_sequence(watch=10, matcher=10, prompt_logprobs=0)
    first, second = logprobs_of(PROMPT[1:2]), logprobs_of(PROMPT[2:])
    assert sequence.append(RowOutput([], prompt_logprobs=first)) == 0
    assert sequence.output == sequence.watch.seen == sequence.matcher.seen == []
    assert end(sequence) == (False, None, None)
    assert sequence.append(RowOutput([11], prompt_logprobs=second)) == 1
    assert sequence.prompt_logprobs == [None, *first, *second]


@pytest.mark.parametrize("max_tokens", range(1, 6))
@pytest.mark.parametrize("num_out", range(3))
@pytest.mark.parametrize("num_in_flight", range(3))
def test_what_is_in_flight_gives_a_token_each_at_least(max_tokens, num_out, num_in_flight):
    sequence = make_sequence(max_tokens)
    sequence.output, sequence.num_in_flight = [10] * num_out, num_in_flight
    assert sequence.may_go_on == (num_out + num_in_flight < max_tokens)


def test_sequences_are_told_apart_by_identity():
    """Two samples may be equal in everything."""
    assert make_sequence() != make_sequence()
