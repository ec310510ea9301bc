"""Which texts are searched for drafts, and what is said of them before K is chosen."""

import math

import pytest

from specjax import SamplingParams
from specjax.host.drafts.suggester import LOOK_EVERY, Suggester
from specjax.host.drafts.text_index import NOTHING, Continuation
from specjax.host.request import Request
from specjax.host.sequence import RowOutput, Sequence

K = 4


class Certain:
    """A source that foretells the tokens 1, 2, 3 and so on, with a score of its own."""

    name = "certain"

    def __init__(self, score=3.0):
        self.score, self.num_steps = score, 0

    def begin_step(self):
        self.num_steps += 1

    def continuation(self, sample, num_in_flight, count):
        if sample.request.request_id == "unknown":
            return NOTHING
        first = len(sample.token_ids)
        return Continuation([*range(first, first + num_in_flight + 3)], self.score)

    def finish(self, sample):
        pass


def sample(name="known"):
    return Sequence(Request(name, (0,), SamplingParams(), 50, (0,)), 0, 0, [0])


def test_what_texts_promise_is_what_is_suggested():
    source = Certain()
    suggester, samples = Suggester([source], K, "eagle3"), [sample(), sample("unknown")]
    found, nothing = suggester.expect(samples)
    assert (found.num_drafts, found.num_accepted, found.chance) == (3, 3.0, 1.0)
    assert (nothing.num_drafts, nothing.chance) == (0, 0.0)
    for one in samples:
        one.max_tokens_in_flight += K + 1
    path, none = suggester.suggest(samples, K)
    assert path.tokens == [1, 2, 3] and path.score == 3.0 and none is None
    assert source.num_steps == 1
    samples[0].append(RowOutput([1, 2, 9], K))  # two of its drafts were right
    suggester.learn(samples, (path, none), [RowOutput([1, 2, 9], K), RowOutput([], K)], [3, 0])
    assert suggester.counts["certain"] == (1, K, 2)
    assert 2.9 < suggester.expect(samples)[0].num_accepted < 3.0


def test_paths_that_are_seldom_used_promise_little():
    suggester, one = Suggester([Certain()], K, "eagle3"), sample()
    for _ in range(300):
        one.max_tokens_in_flight = K + 1
        (path,) = suggester.suggest([one], K)
        one.token_ids.append(99)  # a token in flight, which the path did not foretell
        one.append(RowOutput([99], K))
        suggester.learn([one], (path,), [RowOutput([99], K)], [1])
        del one.token_ids[1:]
    (found,) = suggester.expect([one])
    assert found.num_drafts == 3 and found.chance < 0.01


def test_texts_are_seldom_searched_while_nobody_drafts():
    source = Certain()
    suggester, one = Suggester([source], K, "eagle3"), sample()
    found = [suggester.expect([one]) is not None for _ in range(3 * LOOK_EVERY)]
    assert found == [i % LOOK_EVERY == 0 for i in range(3 * LOOK_EVERY)]
    assert source.num_steps == 3
    one.max_tokens_in_flight = K + 1
    suggester.suggest([one], K)
    assert suggester.expect([one]) is not None


def test_a_score_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="source 'certain': the score of its drafts is NaN"):
        Suggester([Certain(math.nan)], K, "eagle3").expect([sample()])
