"""The choice between drafter and texts, also if one of them becomes good after a bad time."""

import math

import pytest

from specjax import SamplingParams
from specjax.host.drafts.suggester import Suggester
from specjax.host.drafts.text_index import Continuation
from specjax.host.request import Request
from specjax.host.sequence import RowOutput, Sequence

K = 4


class Text:
    """A source of drafts that always predicts the token 1."""

    name = "text"

    def __init__(self, score):
        self.score, self.num_steps = score, 0

    def begin_step(self):
        self.num_steps += 1

    def continuation(self, sample, num_in_flight, count):
        return Continuation([1] * (num_in_flight + count), self.score)

    def finish(self, sample):
        pass


def run(suggester, sequence, num_rounds, of_text, of_drafter):
    """Run rounds in which texts or the drafter have the given numbers of accepted drafts.

    Return the number of rounds with drafts from texts.
    """
    num_used = 0
    for _ in range(num_rounds):
        sequence.max_tokens_in_flight = K + 1  # the planned round
        (path,) = suggester.suggest([sequence], K)
        accepted = of_drafter if path is None else of_text
        tokens = [1] * accepted + [2]
        sequence.token_ids += tokens
        suggester.learn([sequence], (path,), [RowOutput(tokens, K)], [len(tokens)])
        num_used += path is not None
    return num_used


def new_sequence(max_tokens=10**6):
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence.of(Request(0, (1, 1), params, max_tokens, (0,)), 0, 0)


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="source 'text': the score of its drafts is NaN"):
        run(Suggester([Text(math.nan)], K, "head"), new_sequence(), 1, of_text=0, of_drafter=0)


@pytest.mark.parametrize("expects", [True, False])
def test_a_source_is_told_of_each_step_once(expects):
    source, sequence = Text(K), new_sequence()
    suggester = Suggester([source], K, "head")
    for number in range(1, 4):
        if expects:
            suggester.expect([sequence])
        assert suggester.suggest([sequence], K) and source.num_steps == number


def test_texts_come_back_after_a_time_without_use():
    """After a request with useless texts, texts become better than the drafter for another one."""
    suggester = Suggester([Text(K)], K, "head")
    assert run(suggester, new_sequence(), 100, of_text=K, of_drafter=2) == 100
    few = run(suggester, new_sequence(), 10_000, of_text=0, of_drafter=2)
    assert few < 300, "useless drafts cost tokens"
    assert run(suggester, new_sequence(), 10_000, of_text=K, of_drafter=2) > 5000


def test_the_drafter_comes_back_after_a_time_without_use():
    """For one request, texts promise little, and the drafter is bad at first and good later."""
    suggester = Suggester([Text(0.5)], K, "head")
    suggester._mean_of_drafter = 2.0  # of other requests
    sequence = new_sequence()
    assert run(suggester, sequence, 50, of_text=0, of_drafter=0) > 0
    assert run(suggester, sequence, 100, of_text=0, of_drafter=2) < 50
