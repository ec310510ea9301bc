"""Acceptance rates, compared with full records of drafts and with the true rates."""

import random
from collections import Counter
from itertools import accumulate, pairwise
from operator import mul

import numpy as np
import pytest

from specjax.host.speculation.acceptance import (
    MAX_GROUPS,
    MEMORY_DRAFTS,
    MEMORY_ROUNDS,
    Acceptance,
    DraftOutcome,
    expected_tokens,
)
from specjax.host.speculation.requests import ReadyRequests, RequestOutcomes, RequestRates

MOST = 5
# Conditional: of drafts all before which stood.
LAWS = {
    "eagle": (0.68, 0.57, 0.52, 0.50, 0.51),
    "good": (0.95, 0.93, 0.92, 0.92, 0.90),
    "bad": (0.15, 0.10, 0.10, 0.08, 0.05),
    "a cliff": (0.90, 0.85, 0.20, 0.60, 0.60),
}
SCHEDULES = {
    "5": lambda i: 5,
    "1 and 5": lambda i: (1, 5)[i % 2],
    "all": lambda i: (0, 4, 1, 5, 2, 3)[i % 6],
}


def unconditional(law):
    return list(accumulate(law, mul))


def moved(law, shift):
    odds = [p / (1 - p) * np.exp(shift) for p in law]
    return [float(x / (1 + x)) for x in odds]


def draw(rng, law, k, group=None):
    """Draw the outcome of k drafts of one request."""
    num_accepted = 0
    while num_accepted < k and rng.random() < law[num_accepted]:
        num_accepted += 1
    return DraftOutcome(k, num_accepted, group)


def feed(acceptance, rng, law, k, *, batch, rounds, group=None):
    """Let `acceptance` observe rounds of k drafts."""
    for _ in range(rounds):
        acceptance.observe(Counter(draw(rng, law, k, group) for _ in range(batch)))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_counts_are_those_of_drafts_that_were_looked_at(law, schedule):
    """A draft counts if K reached its position and all drafts before it were accepted.

    Later rounds weigh more.
    """
    rng, acceptance, rounds = random.Random(0), Acceptance(MOST), 1200
    seen, stood = np.zeros((rounds, MOST)), np.zeros((rounds, MOST))
    drafted = np.zeros(rounds)
    for i in range(rounds):
        verdict = draw(rng, law, schedule(i))
        acceptance.observe({verdict: 1})
        for position in range(verdict.num_drafts):
            if position <= verdict.num_accepted:
                seen[i, position] = 1
                stood[i, position] = position < verdict.num_accepted
        drafted[i] = verdict.num_drafts > 0
    after = drafted[::-1].cumsum()[::-1] - drafted  # rounds that made each be forgotten
    weight = (1 - 1 / MEMORY_DRAFTS) ** after
    seen, stood = weight @ seen, weight @ stood
    rates = acceptance.rates("nobody's")
    conditional = np.divide(rates, [1.0, *rates[:-1]])
    prior = 4.0  # drafts that a position is given in advance
    assert np.all(conditional >= stood / (seen + prior) - 1e-9)
    assert np.all(conditional <= (stood + prior) / (seen + prior) + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_rates_are_probabilities_that_never_rise(seed):
    rng = random.Random(seed)
    prior = sorted((rng.choice([0.0, rng.random(), 1.0]) for _ in range(MOST)), reverse=True)
    acceptance = Acceptance(MOST, prior)
    for _ in range(300):
        k = rng.randint(0, MOST)
        accepted = [rng.choice([0, k, rng.randint(0, k)]) for _ in range(3)]
        verdicts = [DraftOutcome(k, n, rng.randint(0, 3)) for n in accepted]
        acceptance.observe({verdict: rng.choice([1, 500]) for verdict in verdicts})
        if rng.random() < 0.05:
            acceptance.discount()
        for group in (*range(4), "nobody's"):
            rates = [1.0, *acceptance.rates(group), 0.0]
            assert all(a >= b for a, b in pairwise(rates))


def test_a_round_without_drafts_teaches_nothing():
    acceptance = Acceptance(MOST)
    feed(acceptance, random.Random(3), LAWS["eagle"], 3, batch=4, rounds=20, group="a")
    before = [acceptance.rates(group) for group in ("a", "b")]
    for _ in range(1000):
        acceptance.observe({DraftOutcome(0, 0, "a"): 200, DraftOutcome(0, 0, "b"): 1})
    assert [acceptance.rates(group) for group in ("a", "b")] == before


def test_a_profile_is_believed_as_it_is():
    """Positions after the profile's last rate continue from this rate."""
    profile = [0.6812, 0.3914, 0.2035, 0.1014, 0.0514]
    assert Acceptance(MOST, profile).rates() == pytest.approx(profile, abs=1e-9)
    assert Acceptance(3, profile).rates("any") == pytest.approx(profile[:3], abs=1e-9)
    rates = Acceptance(MOST, [0.9, 0.8]).rates()
    assert rates[:2] == pytest.approx([0.9, 0.8])
    assert all(0.5 * a < b < a for a, b in pairwise(rates))


@pytest.mark.parametrize(
    "batch, rounds, error", [(1, 3 * MEMORY_DRAFTS, 0.12), (256, 3 * MEMORY_ROUNDS, 0.06)]
)
@pytest.mark.parametrize("before, after", [("good", "bad"), ("bad", "good")])
def test_a_change_is_followed(batch, rounds, error, before, after):
    """Rates follow a change within three times the memory, however long they were constant."""
    rng, acceptance = random.Random(5), Acceptance(MOST)
    feed(acceptance, rng, LAWS[before], MOST, batch=batch, rounds=2000 if batch == 1 else 200)
    feed(acceptance, rng, LAWS[after], MOST, batch=batch, rounds=rounds)
    expected = unconditional(LAWS[after])
    np.testing.assert_allclose(acceptance.rates(), expected, atol=error)


@pytest.mark.parametrize("shift", [-1.0, 1.0])
def test_deeper_drafts_follow_without_being_tried(shift):
    rng, acceptance, law = random.Random(6), Acceptance(MOST), LAWS["eagle"]
    feed(acceptance, rng, law, MOST, batch=64, rounds=300)
    before = acceptance.rates()
    feed(acceptance, rng, moved(law, shift), 1, batch=64, rounds=300)
    expected = unconditional(moved(law, shift))
    np.testing.assert_allclose(acceptance.rates(), expected, atol=0.06)
    assert abs(before[2] - expected[2]) > 0.12


def test_a_discount_lets_what_is_new_win_sooner():
    rng = random.Random(7)
    both = [Acceptance(MOST), Acceptance(MOST)]
    for acceptance in both:
        feed(acceptance, random.Random(8), LAWS["good"], MOST, batch=8, rounds=200, group="a")
    before = both[0].rates("a")
    both[0].discount()
    np.testing.assert_allclose(both[0].rates("a"), before, atol=0.1)  # fewer, not others
    verdicts = [draw(rng, LAWS["bad"], MOST, "a") for _ in range(60)]
    for acceptance in both:
        for verdict in verdicts:
            acceptance.observe({verdict: 1})
    truth = LAWS["bad"][0]
    errors = [acceptance.rates("a")[0] - truth for acceptance in both]
    assert 0 < errors[0] < 0.75 * errors[1]


def test_groups_are_told_apart():
    rng, acceptance = random.Random(9), Acceptance(MOST)
    laws = {"easy": LAWS["good"], "hard": LAWS["bad"]}
    for _ in range(200):
        verdicts = [draw(rng, law, MOST, group) for group, law in laws.items() for _ in range(16)]
        acceptance.observe(Counter(verdicts))
    for group, law in laws.items():
        assert acceptance.rates(group)[0] == pytest.approx(law[0], abs=0.06)
    mean = np.mean([law[0] for law in laws.values()])
    assert acceptance.rates("new")[0] == pytest.approx(mean, abs=0.06)
    easy, hard = (expected_tokens(acceptance.rates(group), MOST) for group in laws)
    assert easy > hard + 2


def test_few_verdicts_of_a_group_do_not_weigh_much():
    acceptance = Acceptance(MOST)
    feed(acceptance, random.Random(10), LAWS["good"], MOST, batch=64, rounds=100, group="a")
    acceptance.observe({DraftOutcome(1, 0, "b"): 1})
    assert acceptance.rates("b")[0] == pytest.approx(LAWS["good"][0], abs=0.1)
    acceptance.observe({DraftOutcome(1, 0, "b"): 200})
    assert acceptance.rates("b")[0] < 0.2


@pytest.mark.parametrize("at_once", [1, 7, 200])
def test_groups_of_long_ago_are_forgotten(at_once):
    """A forgotten group has the same rates as a group that never occurred."""
    acceptance, groups = Acceptance(2), [f"group {i}" for i in range(600)]
    for i in range(0, len(groups), at_once):
        new = {DraftOutcome(2, 0, group): 1 for group in groups[i : i + at_once]}
        acceptance.observe({DraftOutcome(2, 2, "always"): 100, **new})
    kept = [g for g in groups if acceptance.rates(g) != acceptance.rates("nobody's")]
    assert 0 < len(kept) <= MAX_GROUPS
    if at_once < MAX_GROUPS:
        assert groups[-1] in kept and groups[0] not in kept
        assert acceptance.rates("always") != acceptance.rates("nobody's")


def test_rates_fall_with_the_context():
    """A bucket starts with the rates of the bucket before. A single bucket has no own rates."""
    laws, rng, acceptance = {0: [0.8] * MOST, 3: [0.2] * MOST}, random.Random(5), Acceptance(MOST)
    for _ in range(200):
        verdicts = [draw(rng, law, MOST)._replace(bucket=b) for b, law in laws.items()]
        acceptance.observe(Counter(verdicts))
    first = [acceptance.rates(bucket=bucket)[0] for bucket in range(6)]
    assert first[0] == pytest.approx(0.8, abs=0.12) and first[3] == pytest.approx(0.2, abs=0.12)
    assert first == pytest.approx([first[0]] * 3 + [first[3]] * 3, abs=0.1)
    alone = Acceptance(MOST)
    alone.observe({DraftOutcome(2, 1, None, 4): 10})
    assert alone.rates(bucket=0) == alone.rates(bucket=6)


def test_a_request_s_own_drafts_count_most():
    """New requests have the rates of similar ones. The number of stored requests is limited."""
    rates, prior = RequestRates(2), [0.5, 0.25]

    def rates_of(*keys):
        many = [None] * len(keys), [9] * len(keys), [2] * len(keys)
        return rates.rates(ReadyRequests(keys, *many), lambda group, bucket: prior).tolist()

    for _ in range(60):
        rates.observe(RequestOutcomes(["a", "b", "c"], [2, 2, 0], [2, 0, 0]))
    (a, b, c, new) = rates_of("a", "b", "c", "new")
    assert a[1] > 0.8 > 0.1 > b[0] and c == new == prior
    rates.fade(["b"], 1e-3)
    assert rates_of("b")[0] == pytest.approx(prior, rel=0.02)
    for i in range(3000):
        rates.observe(RequestOutcomes([f"later {i}", "a"], [2, 2], [0, 2]))
    assert len(rates._rows) < 200 and rates_of("a")[0][1] > 0.9 and rates_of("b") == [prior]
