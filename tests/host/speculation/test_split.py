"""Split rounds: which requests draft, the gain on a model of an H100, and what is learned."""

import numpy as np
import pytest
from host.speculation import h100_rounds
from host.speculation.h100_rounds import (
    BATCHES,
    KS,
    SplitShape,
    all_splits,
    replayed_cost,
    round_ms,
    serve,
)

from specjax.host.speculation.acceptance import Acceptance
from specjax.host.speculation.methods import adaptive_policy
from specjax.host.speculation.policy import GoodputPolicy
from specjax.host.speculation.requests import ReadyRequests, RequestRates, TextDrafts
from specjax.host.speculation.rounds import DecodeLoad, Round, Split
from specjax.host.speculation.split import Splitter, split_ms
from specjax.host.speculation.step_cost import StepCost

HALVES = 0.9, 0.1


def adaptive(seed=1, max_slowdown=0.0):
    cost = replayed_cost(np.random.default_rng(seed), 0.08)
    return adaptive_policy(KS[-1], cost, max_slowdown)


def best_static(rates, contexts):
    return max(serve(k, rates, contexts, 1, 0).speed() for k in KS)


def of(rates, n):
    """Return the values of n requests: one for the first half, another for the second half."""
    return [rates[0]] * (n // 2) + [rates[1]] * (n // 2)


def test_those_whose_drafts_are_accepted_draft():
    """If rows cost time, splits beat every common K. Otherwise, they are hardly slower."""
    for n, least in (4, 0.99), (64, 1.12):
        rates, contexts = of(HALVES, n), [1000] * n
        served = serve(adaptive(), rates, contexts, 400, 0)
        assert served.speed(100) > least * best_static(rates, contexts)
        drafts = served.drafts[100:].reshape(-1, 2, n // 2).mean(axis=(0, 2))
        assert n == 4 or (drafts[0] > 4.5 and drafts[1] < 0.5)


def test_long_requests_stop_drafting_if_it_does_not_pay():
    """Only long requests stop if they may be slowed down (`max_slowdown`)."""
    rates, contexts = of((0.7, 0.02), 16), of((1000, 66_000), 16)
    served = serve(adaptive(max_slowdown=1.0), rates, contexts, 400, 0)
    drafts = served.drafts[200:].reshape(-1, 2, 8).mean(axis=(0, 2))
    assert drafts[0] > 3 and drafts[1] < 0.5
    assert served.speed() > 1.3 * serve(0, rates, contexts, 1, 0).speed()


@pytest.mark.slow
@pytest.mark.parametrize("n, rate, gain", [(4, 0.02, 1.0), (64, 0.02, 1.0), (64, 0.2, 1.5)])
def test_no_range_of_lengths_is_slower_than_off(n, rate, gain):
    """Long requests are slower than without drafts only as far as `max_slowdown` allows."""
    rates, contexts = of((0.7, rate), n), of((1000, 66_000), n)
    parts = slice(0, n // 2), slice(n // 2, n)
    off = [serve(0, rates, contexts, 1, 0).speed(0, part) for part in parts]
    served = [serve(adaptive(1, limit), rates, contexts, 400, 0) for limit in (0.0, 0.05)]
    short, long = (served[0].speed(0, x) / y for x, y in zip(parts, off, strict=True))
    assert long > 0.99 and short > gain
    allowed = [served[1].speed(200, x) / y for x, y in zip(parts, off, strict=True)]
    assert allowed[1] > 0.94 and allowed[0] > short - 0.01


@pytest.mark.parametrize("n", [1, 16, 256])
@pytest.mark.parametrize("rate", [0.001, 0.1])
def test_adaptive_is_never_slower_than_off(n, rate):
    """The time of tries is included, from the first round on."""
    for context in 1000, 66_000:
        served = serve(adaptive(), [rate] * n, [context] * n, 800 if n == 1 else 300, 0)
        assert served.speed() >= 0.99 * n / round_ms(n, 0, 0, n * context)


@pytest.mark.slow
def test_a_request_that_improves_drafts_again():
    """A request's old counts lose weight while it does not draft."""
    policy = adaptive()
    rates = of(HALVES, 64)
    serve(policy, rates, [1000] * 64, 300, 0)
    served = serve(policy, [0.9] * 64, [1000] * 64, 1500, 1)
    assert served.drafts[-200:].mean() > 0.8 * KS[-1]


def test_a_split_that_is_slower_than_expected_is_dropped(monkeypatch):
    """The time of its program is learned. Estimates of other shapes do not change."""
    policy, rates, contexts = adaptive(), of(HALVES, 64), [1000] * 64
    monkeypatch.setattr(h100_rounds, "SPLIT_MS", 6.0)
    served = serve(policy, rates, contexts, 400, 0)
    assert (served.drafts[-50:].min(axis=1) == served.drafts[-50:].max(axis=1)).all()
    assert served.speed(50) > 0.95 * best_static(rates, contexts)


@pytest.mark.parametrize("times, is_kept", [((200.0,) * 3, False), ((200.0, 11.0, 11.0), True)])
def test_a_slow_program_is_dropped_at_once_but_not_for_one_slow_round(times, is_kept):
    """Two programs run only while the joint program is missing, so their time no longer counts."""
    batches, shape, splitter = (4, 8), SplitShape(4, 3, 4), Splitter()
    cost = StepCost({b: {0: b, 3: 1.9 * b} for b in batches}, batches=batches)
    gains = np.array([[0, 0.9, 1.7, 2.4]] * 4 + [[0] * 4] * 4)
    requests = ReadyRequests(range(8), [None] * 8, [9] * 8, [3] * 8)
    load = DecodeLoad(8, 72, None, requests, {shape}, [(b, k) for b in batches for k in (0, 3)])

    def choose():
        return splitter.choose(load, gains, 8 / cost.ms(8, 0), cost, RequestRates(3), None)

    assert choose() == Split(shape, [0, 1, 2, 3])
    for ms in times:
        splitter.observe(Round(4, 3, 36, {}, ms, others=4, others_context=36), cost)
    splitter.clear()
    assert choose() == (Split(shape, [0, 1, 2, 3]) if is_kept else None)


@pytest.mark.parametrize("batches", [(1, 8, 64), (4, 8)])
def test_the_time_of_a_split_round_is_the_sum_of_its_rows_and_runs_of_the_drafter(batches):
    """In this model a row takes .3 ms, and a run of the drafter .8 ms."""
    points = {b: {k: 9 + 0.3 * b * (k + 1) + 0.8 * k for k in (0, 1, 3, 5)} for b in batches}
    cost = StepCost(points, batches=batches)
    for k in 3, 5:
        expected = 9 + 0.3 * (4 * (k + 1) + 4) + 0.8 * k
        assert split_ms(cost, SplitShape(4, k, 4)) == pytest.approx(expected)


def test_few_long_requests_do_not_stop_the_others():
    rates, contexts = [0.7] * 63 + [0.02], [1000] * 63 + [66_000]
    short = slice(0, 63)
    off = serve(0, rates, contexts, 1, 0).speed(0, short)
    assert serve(adaptive(), rates, contexts, 200, 0).speed(0, short) > 1.8 * off


def test_known_times_are_not_doubted():
    """If all ranges of lengths gain a little from drafts, K is chosen as for a single range."""
    cost, rates = replayed_cost(), [0.13] + [0.0] * (KS[-1] - 1)
    found = []
    for contexts in [1000] * 4, of((800, 4100), 4):
        policy = GoodputPolicy(
            KS, cost, Acceptance(KS[-1], rates), learns_cost=False, learns_acceptance=False
        )
        requests = ReadyRequests(range(4), [None] * 4, contexts, [KS[-1]] * 4)
        load = DecodeLoad(4, sum(contexts), None, requests)
        goodput = policy.goodput(load)
        assert 1.0 < goodput[1] / goodput[0] < 1.05
        found.append(policy.choose(load))
    assert found == [1, 1]


def test_requests_draft_if_texts_are_expected_to_be_accepted():
    """Only requests with good texts draft; none does if its rows cost more than drafts gain."""
    policy, n = adaptive(), 64
    serve(policy, [0.02] * n, [1000] * n, 200, 0)
    nothing = TextDrafts(0, 0.0, 0.0)

    def drafts(*texts):
        given = [one for one in texts for _ in range(n // len(texts))]
        requests = ReadyRequests(range(n), [None] * n, [1000] * n, [KS[-1]] * n, given)
        shapes = [(batch, k) for batch in BATCHES for k in KS]
        k = policy.choose(DecodeLoad(n, 1000 * n, None, requests, all_splits(), shapes))
        return k, sorted(policy.split.drafting) if policy.split else None

    assert drafts(nothing)[0] == 0
    assert drafts(nothing, TextDrafts(5, 4.5, 0.9)) == (5, [*range(n // 2, n)])
    assert drafts(nothing, TextDrafts(5, 4.5, 0.02)) == (0, None)
    assert drafts(TextDrafts(5, 0.3, 0.9)) == (0, None)
    assert drafts(TextDrafts(2, 1.9, 0.9)) == (2, None)


@pytest.mark.parametrize("ready, expected", [((), 32), ((SplitShape(32, 5, 32),), None)])
def test_what_is_not_compiled_is_wished_for(ready, expected):
    """Until its program is ready, a split round would read the weights twice, which is slower."""
    policy, wishes = adaptive(), []
    choose = policy.choose

    def noting(load):
        k = choose(load)
        wishes.append(policy.wish)
        return k

    policy.choose = noting
    served = serve(policy, of(HALVES, 64), [1000] * 64, 200, 0, ready=ready)
    drafts = served.drafts[100:]
    is_split = (drafts.min(axis=1) < drafts.max(axis=1)).mean() > 0.5
    assert is_split == (expected is None)
    wished = {wish.shape.drafting for wish in wishes if wish is not None}
    assert wished == (set() if expected is None else {expected})
    assert all(0 < wish.gain < 0.5 for wish in wishes if wish)
