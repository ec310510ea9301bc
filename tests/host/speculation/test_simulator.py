"""The simulator, compared with closed forms; and minimum results of policies in it.

Policies are compared by means over paired seeds: each policy serves the same requests.
"""

import random
from functools import cache
from itertools import accumulate, pairwise, product
from operator import mul
from statistics import fmean

import numpy as np
import pytest
from host.speculation import baselines
from host.speculation.baselines import GRIDS, SHIFTS, Scenario

from specjax.host.speculation.acceptance import Acceptance
from specjax.host.speculation.policy import GoodputPolicy, StaticPolicy
from specjax.host.speculation.simulator import Workload, World, simulate
from specjax.host.speculation.step_cost import StepCost

RATES = (0.70, 0.45, 0.25, 0.15, 0.08)
KS = range(6)
LINES = {1: (8, 1), 4: (9, 1.5), 8: (12, 4)}  # milliseconds at K = 0, and of each draft
POINTS = {batch: {k: a + b * k for k in KS} for batch, (a, b) in LINES.items()}
BATCHES = (1, 4, 8)


def make_world(**others):
    return World(StepCost(POINTS, batches=BATCHES), RATES, BATCHES, **others)


def alike(num_requests, length):
    """Return requests of one length that arrive together, and have equal acceptance rates."""
    return Workload([length] * num_requests, [0.0] * num_requests, [0.0] * num_requests)


def adaptive():
    return GoodputPolicy(KS, None, Acceptance(5))


class Watched:
    """A policy that records the loads and the rounds."""

    is_learning = True

    def __init__(self, policy):
        self.policy, self.loads, self.rounds, self.order = policy, [], [], []
        self.choices, self.begin = policy.choices, policy.begin

    def choose(self, load):
        self.loads.append(load)
        self.order.append("choose")
        return self.policy.choose(load)

    def observe(self, outcome):
        self.rounds.append(outcome)
        self.order.append("observe")
        self.policy.observe(outcome)


def tokens_of(outcome):
    return sum((v.num_accepted + 1) * count for v, count in outcome.verdicts.items())


# --- the simulator itself -------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adaptive, lambda: StaticPolicy(2), lambda: None])
def test_a_seed_says_all(make):
    workload, again, other = (Workload.rollout(random.Random(i), 12, median=100) for i in (0, 0, 1))
    assert workload == again != other
    world = make_world(shift=-1)
    first, again, other = (simulate(world, workload, make(), seed=seed) for seed in (3, 3, 4))
    assert first == again and len(first.trace) > 100 and first.trace != other.trace


@pytest.mark.parametrize("k", [0, 2, 5])
def test_every_token_is_made_once(k):
    workload = Workload.rollout(random.Random(0), 30, median=100)
    watched = Watched(StaticPolicy(k))
    outcome = simulate(make_world(), workload, watched)
    assert outcome.num_tokens == sum(workload.lengths)
    last = outcome.num_tokens - sum(map(tokens_of, watched.rounds))
    assert 1 <= last <= k + 1  # of the one round that nobody learned of
    assert watched.order[:5] == ["choose", "choose", "observe", "choose", "observe"]
    assert sum(outcome.k_histogram.values()) == len(outcome.trace) == len(watched.rounds) + 1
    assert sum(outcome.ms_by_batch.values()) == pytest.approx(outcome.makespan_ms)
    # No context is simulated: what is chosen by and what is learned from agree.
    assert {seen.num_context for seen in [*watched.loads, *watched.rounds]} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("k", KS)
def test_a_static_k_alone_is_a_closed_form(k):
    """The mean number of tokens per round is AL(k), with an error bound from its variance."""
    length = 30_000
    outcome = simulate(make_world(), alike(1, length), StaticPolicy(k), seed=1)
    probabilities = np.diff([0.0, *(1 - np.array(RATES[:k])), 1.0])
    tokens = np.arange(1, k + 2)
    mean = tokens @ probabilities
    deviation = np.sqrt(tokens**2 @ probabilities - mean**2)
    num_rounds = len(outcome.trace)
    assert mean == pytest.approx(1 + sum(RATES[:k]))
    error = 4 * deviation / np.sqrt(num_rounds) + (k + 1) / num_rounds
    assert length / num_rounds == pytest.approx(mean, abs=error)
    assert outcome.makespan_ms / num_rounds == pytest.approx(POINTS[1][k], rel=0.005)
    goodput = [(1 + sum(RATES[:j])) / POINTS[1][j] for j in KS]
    regret = pytest.approx(1 - goodput[k] / max(goodput), abs=1e-9)
    assert outcome.regret_by_batch == {1: regret}


@pytest.mark.parametrize("shift", [-1.0, 0.7])
def test_regret_round_by_round(shift):
    """As all requests are equal, the regret follows from the trace and the observed tokens."""
    watched = Watched(adaptive())
    outcome = simulate(make_world(shift=shift, noise=0.0), alike(6, 2000), watched, seed=3)
    odds = np.divide(RATES, [1.0, *RATES[:-1]])
    odds = odds / (1 - odds) * np.exp(shift)
    laws = RATES, list(accumulate(odds / (1 + odds), mul))
    came = accumulate(map(tokens_of, watched.rounds), initial=0)
    lost = 0.0
    for num_tokens, (_, num_sequences, k) in zip(came, outcome.trace, strict=True):
        rates = laws[num_tokens >= 6000]
        batch = min(b for b in BATCHES if b >= num_sequences)
        goodput = [(1 + sum(rates[:j])) / POINTS[batch][j] for j in KS]
        lost += POINTS[batch][k] * (1 - goodput[k] / max(goodput))
    assert outcome.regret == pytest.approx(lost / outcome.makespan_ms)


@pytest.mark.parametrize("rates", [(0.5, 0.0, 0.0), (1.0, 1.0, 0.5), (0.0,)])
def test_drafts_that_always_stand_or_never(rates):
    """A profile may have acceptance rates of 0 and 1."""
    world = World(StepCost(POINTS, batches=BATCHES), rates, BATCHES)
    watched = Watched(StaticPolicy(len(rates)))
    simulate(world, alike(2, 3000), watched)
    counts = np.zeros(len(rates))
    for outcome in watched.rounds[:-3]:
        for verdict, count in outcome.verdicts.items():
            counts[: verdict.num_accepted] += count / (2 * len(watched.rounds[:-3]))
    np.testing.assert_allclose(counts, rates, atol=0.05)


def test_no_more_run_than_fit_and_none_before_it_comes():
    rng = random.Random(4)
    workload = Workload.stream(rng, 60, per_second=12.0, median=100)
    assert all(a < b for a, b in pairwise(workload.arrivals)) and len(workload.arrivals) == 60
    assert np.mean(np.diff(workload.arrivals)) == pytest.approx(1000 / 12, rel=0.5)
    watched = Watched(StaticPolicy(2))
    outcome = simulate(make_world(), workload, watched)
    counts = [n for _, n, _ in outcome.trace]
    assert max(counts) == BATCHES[-1] and min(counts) >= 1
    assert [load.num_sequences for load in watched.loads] == counts
    for now, n, _ in outcome.trace:
        assert n <= sum(arrival <= now for arrival in workload.arrivals)
    assert all(a < b for (a, *_), (b, *_) in pairwise(outcome.trace))


def test_it_waits_for_the_next_when_all_are_done():
    workload = Workload([50, 50], [100.0, 100_000.0], [0.0, 0.0])
    outcome = simulate(make_world(noise=0.0), workload, StaticPolicy(0))
    starts = [now for now, *_ in outcome.trace]
    assert starts[0] == 100.0 and starts[50] == 100_000.0 and len(starts) == 100
    assert outcome.makespan_ms == pytest.approx(100_000 + 50 * 8 - 100)


# --- policies in it -------------------------------------------------------------------------------


@cache
def runs(grid, shift, name, is_small):
    """Return the outcome of each seed.

    `is_small` selects few, short runs instead of slow tests'.
    """
    num_seeds, num_requests = (2, 48) if is_small else (4, 256)
    scenario = Scenario(grid, shift)
    return [baselines.run(scenario, name, seed, num_requests) for seed in range(num_seeds)]


def regret(outcomes):
    return fmean(outcome.regret for outcome in outcomes)


def makespan_ratios(outcomes, others):
    return [a.makespan_ms / b.makespan_ms for a, b in zip(outcomes, others, strict=True)]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


DAILY = ("seed", 0.0), ("moe", 1.0)  # grids and shifts with long runs by day


def long(grid, shift, *values):
    mark = pytest.mark.slow if (grid, shift) in DAILY else pytest.mark.nightly
    return pytest.param(grid, shift, *values, marks=mark)


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["seed", *(slow(grid) for grid in GRIDS if grid != "seed")])
def test_the_oracle_regrets_nothing(grid):
    """No policy is much faster than the oracle, although it is only optimal round by round."""
    oracle = runs(grid, 0.0, "oracle", True)
    assert regret(oracle) == 0
    for name in ("adaptive", "table", *(f"K = {k}" for k in KS)):
        others = runs(grid, 0.0, name, True)
        assert 0 <= regret(others) < 1
        assert fmean(makespan_ratios(others, oracle)) > 0.96  # few seeds: 2 % of noise


@pytest.mark.slow
@pytest.mark.parametrize("grid, shift, is_small", [
    *((grid, shift, True) for grid, shift in product(GRIDS, SHIFTS)),
    *(long(grid, shift, False) for grid, shift in product(GRIDS, SHIFTS)),
])  # fmt: skip
def test_adaptive_regrets_little(grid, shift, is_small):
    limit = 0.015 if grid == "seed" else 0.02
    found = regret(runs(grid, shift, "adaptive", is_small))
    assert found <= (0.03 if shift or is_small else limit)


def rivals():
    """Yield all combinations of grid, shift and other policy.

    For the grid "seed", the policies "table" and "table of the seed" are the same.
    """
    for grid, shift in product(GRIDS, [*SHIFTS, None]):
        others = ("table of the seed",) if grid != "seed" else ()
        for name in ("table", *others, "thresholds"):
            yield long(grid, shift, name)


@pytest.mark.parametrize("grid, shift, name", [*rivals()])
def test_adaptive_regrets_less_than(grid, shift, name):
    assert regret(runs(grid, shift, "adaptive", False)) < regret(runs(grid, shift, name, False))


@pytest.mark.slow
@pytest.mark.parametrize("grid, shift, is_small", [
    ("seed", None, True), *(long(grid, None, False) for grid in GRIDS),
])  # fmt: skip
def test_adaptive_is_as_fast_as_no_drafts_if_none_is_accepted(grid, shift, is_small):
    pair = [runs(grid, shift, name, is_small) for name in ("adaptive", "K = 0")]
    ratios = makespan_ratios(*pair)
    assert fmean(ratios) <= (1.015 if is_small else 1.01) and max(ratios) <= 1.02
