"""The choice of K: the best K, when K changes, and the cost of trying other Ks."""

import random
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
from host.speculation.baselines import GRIDS
from host.speculation.steady_loads import draw_verdicts

from specjax.host.speculation.acceptance import Acceptance, DraftOutcome
from specjax.host.speculation.policy import (
    LONG_LED,
    PARKED_FIRST,
    PARKED_LAST,
    PROBE_BUDGET,
    PROBE_EVERY,
    DecodeLoad,
    GoodputPolicy,
    Round,
    StaticPolicy,
    TablePolicy,
)
from specjax.host.speculation.requests import ReadyRequests, RequestOutcomes, TextDrafts
from specjax.host.speculation.step_cost import StepCost

KS = range(6)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# One K is better than its neighbours by 7 %: 2 where drafts are accepted so, 0 where none is.
RATES = (0.80, 0.60, 0.10, 0.05, 0.02)
GOOD = (0.8, 0.64, 0.51, 0.41, 0.33)
HIGH = (0.95, 0.9, 0.86, 0.82, 0.78)  # all drafts are worth their time
NOTHING = (0.0,) * 5
ROW = {0: 10.0, 1: 11.5, 2: 13.0, 3: 14.5, 4: 16.0, 5: 17.5}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


def alike(row=ROW):
    """Return times that are equal for all batch sizes."""
    return StepCost({batch: row for batch in BATCHES}, batches=BATCHES)


def frozen(cost, rates=RATES, ks=KS):
    acceptance = Acceptance(len(rates), rates)
    return GoodputPolicy(ks, cost, acceptance, learns_cost=False, learns_acceptance=False)


def adaptive(cost=None, rates=(), ks=KS, **options):
    return GoodputPolicy(ks, cost or alike(), Acceptance(5, rates), **options)


def requests_of(members, length=100):
    """Return new requests. `members` has the number of requests per (group, limit)."""
    groups, limits = zip(*Counter(members).elements(), strict=True)
    return ReadyRequests(range(len(groups)), groups, [length] * len(groups), limits)


def verdicts_of(rng, laws, k, count):
    """Draw the outcomes of `count` requests of each group, given the group's rates."""
    drawn = {group: draw_verdicts(rng, rates, k, count) for group, rates in laws.items()}
    return {v._replace(group=g): n for g, verdicts in drawn.items() for v, n in verdicts.items()}


def serve(policy, rates, num_rounds, *, batch, row=ROW, noise=0.03, seed=0):
    """Return the K of each round. The policy observes a round after it has chosen the next one."""
    rng, ks, late = np.random.default_rng(seed), [], None
    for _ in range(num_rounds):
        assert policy.choose(DecodeLoad(0)) in policy.choices  # nobody decodes: it changes nothing
        k = policy.choose(DecodeLoad(batch))
        if late is not None:
            policy.observe(late)
        ms = row[k] * max(0.1, 1 + noise * rng.standard_normal())
        late = Round(batch, k, 0, draw_verdicts(rng, rates, k, batch), ms)
        ks.append(k)
    return ks


# --- rules ----------------------------------------------------------------------------------------


def test_table_policy_goes_by_the_number_of_sequences():
    """Sizes in a gap, or beyond the last entry, have the K of the entry before."""
    policy = TablePolicy(((1, 1, 5), (5, 8, 3), (16, 32, 3), (33, 40, 0)))
    expected = {5: (0, 1, 2, 4), 3: (5, 8, 9, 15, 16, 32), 0: (33, 40, 41, 999)}
    for k, sizes in expected.items():
        assert {policy.choose(DecodeLoad(size)) for size in sizes} == {k}
    assert policy.choices == (0, 3, 5) and not policy.is_learning


# --- the best by exact figures --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_best_is_that_of_trying_all(seed):
    """Each request counts with its limit and group, and contexts add time.

    If a larger K leaves sequences out of the token budget, their tokens are missing.
    """
    rng, drafts = random.Random(seed), np.random.default_rng(seed)
    cost = StepCost(GRIDS[rng.choice([*GRIDS])], ms_per_context_token=1e-4)
    policy = frozen(cost)
    laws = {"a": (0.95, 0.9, 0.85, 0.8, 0.8), "b": (0.3, 0.1, 0.05, 0.03, 0.01)}
    for _ in range(100):
        policy.acceptance.observe(verdicts_of(drafts, laws, 5, 1))
    members = {(None, 5): rng.randint(1, 300)}
    if seed % 4:
        pairs = [(group, limit) for group in ("a", "b", "new") for limit in rng.sample(KS, 2)]
        members = {pair: rng.randint(1, 50) for pair in pairs}
    n, budget, context = sum(members.values()), rng.randint(6, 900), rng.randint(0, 10**5)
    load = DecodeLoad(n, context, budget, requests_of(members) if seed % 4 else None)
    expected = {}
    for k in KS:
        num_run = min(n, budget // (k + 1))
        tokens = sum(
            count * (1 + sum(policy.acceptance.rates(group)[: min(k, limit)]))
            for (group, limit), count in members.items()
        )
        expected[k] = num_run / n * tokens / cost.ms(num_run, k, context * num_run / n)
    assert policy.goodput(load) == pytest.approx(expected)
    # Where two are equal but for rounding, either will do.
    assert expected[policy.choose(load)] >= max(expected.values()) * (1 - 1e-9)


# --- what holds a choice --------------------------------------------------------------------------


def leading(lead):
    """Return a policy for which K = 1 is best at batch size 1, and K = 2 by 10 % at 64.

    At batch size 1, K = 1 is better by the fraction `lead`. At first, the policy makes no tries.
    """
    rates = (0.5, 0.25)
    at_1 = {1: 15.0, 2: 17.5 * (1 + lead)}
    at_64 = {1: 45.0, 2: 52.5 / 1.1}
    policy = GoodputPolicy(
        (1, 2),
        StepCost({1: at_1, 64: at_64}, batches=(1, 64)),
        Acceptance(2, rates),
        learns_cost=False,
    )
    for _ in range(3):
        for batch in (1, 64):
            for k in (1, 2):
                policy.observe(Round(batch, k, 0, {DraftOutcome(0, 0): 1}, None))
    assert policy.choose(DecodeLoad(64)) == 2
    return policy


@pytest.mark.parametrize(
    "lead, at_64, expected",
    [
        (0.03, (), [1]),  # clear: it counts at once
        (0.01, (), [2] * (LONG_LED - 1) + [1] * 21),  # small: it has to last
        (0.01, (10,), [2] * (10 + LONG_LED) + [1]),  # interrupted: as long again
        (0.01, (39, 79, 119), [2] * 120),
        (0.0, (), [2] * 3 * LONG_LED),
    ],
    ids=["clear", "small", "interrupted", "comes and goes", "none"],
)
def test_a_small_lead_has_to_last(lead, at_64, expected):
    policy = leading(lead)
    ks = [policy.choose(DecodeLoad(64 if i in at_64 else 1)) for i in range(len(expected))]
    assert ks == expected


# --- what trying others costs ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("best, rates, batch", [
    (2, RATES, 16), nightly(5, HIGH, 1), nightly(5, HIGH, 256),
])  # fmt: skip
def test_tries_are_few_and_cheap(best, rates, batch):
    """The time of tries is limited in every run. Their number is limited in the median run.

    One wrong choice may last long.
    """
    goodput = {k: (1 + sum(rates[:k])) / ms for k, ms in ROW.items()}
    assert max(goodput, key=goodput.__getitem__) == best
    others = []
    for seed in range(3):
        counts = Counter(serve(adaptive(), rates, 10_000, batch=batch, seed=seed))
        others.append(counts.total() - counts[best])
        times = {k: n * ROW[k] for k, n in counts.items()}
        lost = sum(ms * (1 - goodput[k] / goodput[best]) for k, ms in times.items())
        assert lost <= PROBE_BUDGET * sum(times.values()) + 20 * ROW[5]
    assert 10 <= min(others) and np.median(others) <= 0.02 * 10_000


@pytest.mark.slow
def test_neighbours_are_tried_and_hardly_others():
    counts = Counter(serve(adaptive(rates=RATES), RATES, 10_000, batch=16))
    assert min(counts[1], counts[3]) >= 20
    assert counts[1] + counts[3] >= 0.9 * (10_000 - counts[2])


def test_only_a_policy_that_learns_times_doubts_them():
    """If times are known, other Ks are tried only every `PROBE_EVERY` rounds."""
    policy = adaptive(rates=RATES, learns_cost=False)
    ks = serve(policy, RATES, 1_000, batch=256)
    assert 1_000 - ks.count(2) <= 1_000 // PROBE_EVERY


@pytest.mark.slow
def test_tries_to_draft_come_less_and_less_often():
    """Each try is one round of 16 requests. The first one comes before anything is known."""
    ks = serve(adaptive(), NOTHING, 16_000, batch=16)
    drafting = [i for i, k in enumerate(ks) if k > 0]
    longer = [gap for gap in np.diff(drafting).tolist() if gap > 1]
    doubling = [PARKED_FIRST * 2**i for i in range(len(longer))]
    assert longer == [min(gap, PARKED_LAST) for gap in doubling]
    assert len(longer) >= 12 and longer[-1] == PARKED_LAST


def test_a_lone_request_tries_as_many_drafts():
    ks = serve(adaptive(), NOTHING, 5_000, batch=1)
    drafted = "".join("x" if k else "." for k in ks[1000:])
    runs = drafted.strip("x").split(".")  # those that are whole
    assert {len(run) for run in runs if run} == {16}


def test_a_try_that_slows_down_long_contexts_costs_all_of_its_longer_round():
    """Half of the requests draft nothing, and their contexts are long: only K = 0 is fair.

    Drafts would give more tokens per millisecond, but a try still costs 7.5 ms. Tries may take half
    a per cent of the time, .05 ms per round.
    """
    ready = ReadyRequests(range(32), ["short", "long"] * 16, [100, 20_000] * 16, [5, 0] * 16)
    load = DecodeLoad(32, sum(ready.lengths), requests=ready)
    policy = adaptive(rates=HIGH, learns_cost=False, max_slowdown=0.01)
    goodput = policy.goodput(load)
    assert max(goodput, key=goodput.__getitem__) == 5
    ks = [policy.choose(load) for _ in range(200)]
    assert [i for i, k in enumerate(ks) if k] == [pytest.approx(149, abs=1)]


@pytest.mark.slow
@pytest.mark.parametrize("num_dead, batch", [
    (500, 1), (500, 256), slow(8_000, 1), slow(8_000, 16),
])  # fmt: skip
def test_better_drafts_are_found_again(num_dead, batch):
    """They are found by the second of the rarest tries, `PARKED_LAST` rounds apart."""
    found = 2 * PARKED_LAST + 100
    policy = adaptive()
    assert serve(policy, NOTHING, num_dead, batch=batch)[-100:].count(0) >= 80
    ks = serve(policy, GOOD, found + 200, batch=batch, seed=1)
    assert np.mean(np.array(ks[found:]) > 0) > 0.95


def given_up(batch, row=ROW):
    """Return a policy that stopped drafting long ago, because no draft was accepted."""
    policy = adaptive(alike(row))
    assert set(serve(policy, NOTHING, 2_000, batch=batch, row=row)[-20:]) == {0}
    return policy


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 16, 256])
@pytest.mark.parametrize("rates, start, least", [(GOOD, 0, 0.95), (NOTHING, 100, 0.9)])
def test_a_new_drafter_is_met_with_hope(batch, rates, start, least):
    """Drafting starts in the next round, and stops again soon if the drafter is no better."""
    policy = given_up(batch)
    policy.drafter_changed()
    ks = np.array(serve(policy, rates, start + 200, batch=batch, seed=1))
    assert ks[0] > 0 and np.mean((ks[start:] > 0) == (rates is GOOD)) > least


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 16, 256])
def test_a_new_target_is_tried_at_once(batch):
    """Drafting is tried, even long after it has stopped. A few tries find that it pays again."""
    policy = given_up(batch)
    before = [policy.choose(DecodeLoad(batch)) for _ in range(3)]
    policy.target_changed()
    tried = [policy.choose(DecodeLoad(batch)) for _ in range(40)]
    num_rounds = -(-16 // batch)
    assert before == [0] * 3 and all(tried[:num_rounds]) and not any(tried[num_rounds:])
    policy, ks = given_up(batch), []
    for seed in range(6):  # updates, some rounds apart
        policy.target_changed()
        ks += serve(policy, GOOD, 80, batch=batch, seed=seed)
    assert np.mean(np.array(ks[-160:]) > 0) > 0.9


def test_many_new_targets_cost_little():
    """In training, each rollout has new weights, so drafting is tried often, and may never pay."""
    row = {0: 10.0, 1: 19.0, 2: 28.0, 3: 37.0, 4: 46.0, 5: 55.0}
    policy, ks = given_up(16, row), []
    for seed in range(40):
        policy.target_changed()
        ks += serve(policy, NOTHING, 60, batch=16, row=row, seed=seed)
    assert 1 < np.mean([row[k] for k in ks[1200:]]) / row[0] < 1.008  # 1.015 with each tried


@pytest.mark.parametrize("factor", [1.2, 1.5])
def test_a_round_without_drafts_that_was_timed_too_long_is_found_out(factor):
    """K = 0 is tried a few times early, even if it seems slow: its rounds cannot be slower."""
    row = {0: 10.0, 1: 17.5, 2: 22.0, 3: 27.0, 4: 33.0, 5: 38.0}
    policy = adaptive(alike(row | {0: factor * row[0]}), (0.64, 0.4, 0.25, 0.16, 0.1))
    ks = serve(policy, (0.64, 0.4, 0.25, 0.16, 0.1), 400, batch=16, row=row)
    assert np.mean(np.array(ks[150:]) == 0) > 0.95


def test_policies_that_learn_nothing_stay_as_they_are():
    for policy in frozen(alike(), RATES), StaticPolicy(2), TablePolicy(((1, 1, 2),)):
        before = policy.choose(DecodeLoad(1))
        policy.target_changed()
        policy.drafter_changed()
        assert set(serve(policy, NOTHING, 1000, batch=1)) == {before} == {2}
        assert not policy.is_learning


# --- what it may depend on ------------------------------------------------------------------------


def test_a_profile_s_rates_hold_until_it_is_warm():
    policy = adaptive(rates=(0.9, 0.8, 0.7, 0.6, 0.5), warm_up_rounds=10, learns_cost=False)
    ks = serve(policy, NOTHING, 60, batch=64)
    # A round is known after the next is chosen; one is a try.
    assert ks[:11].count(5) >= 10 and ks[11] == 0 and ks[11:].count(0) >= 45


@pytest.mark.parametrize("is_replayed", [True, False])
def test_times_come_from_replays_unless_they_are_given(is_replayed):
    """The same holds for shapes that become ready later."""
    policy = GoodputPolicy(KS, None if is_replayed else alike(), Acceptance(5))
    policy.begin(lambda: alike({k: 2 * ms for k, ms in ROW.items()}))
    assert policy.cost.ms(1, 2) == ROW[2] * (1 + is_replayed)
    before = policy.cost.ms(4, 1)
    policy.shape_ready(4, 1, lambda: before + 1)
    assert (policy.cost.ms(4, 1) > before) == is_replayed


def test_times_that_mean_nothing_are_left_out():
    policy = adaptive()
    before = [policy.cost.ms(16, k) for k in KS]
    for _ in range(50):
        policy.observe(Round(16, 2, 0, {DraftOutcome(2, 2): 16}, None))
    assert [policy.cost.ms(16, k) for k in KS] == before


def test_a_policy_cannot_see_a_draft():
    """A policy sees only counts and times: K must not depend on the tokens of drafts."""
    seen = [field.name for kind in (DecodeLoad, Round) for field in fields(kind)]
    named = DraftOutcome, ReadyRequests, TextDrafts, RequestOutcomes
    assert [*seen, *(name for kind in named for name in kind._fields)] == [
        "num_sequences", "num_context", "max_tokens", "requests", "splits", "shapes",
        "batch", "k", "num_context", "verdicts", "ms", "requests",
        "others", "others_context",
        "num_drafts", "num_accepted", "group", "bucket",
        "keys", "groups", "lengths", "limits", "texts",
        "num_drafts", "num_accepted", "chance",  # expected, of certain drafts, from earlier tokens
        "keys", "num_drafts", "num_accepted",
    ]  # fmt: skip
