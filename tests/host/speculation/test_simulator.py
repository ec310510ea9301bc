"""The simulator against closed forms, and what policies have to reach in it.

The gates compare means over paired seeds: the same requests, and the same law, for every policy.
"""

import importlib
import random
from functools import cache
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from specjax.host.speculation.acceptance import Acceptance
from specjax.host.speculation.policy import GoodputPolicy, StaticPolicy
from specjax.host.speculation.simulator import Workload, World, simulate
from specjax.host.speculation.step_cost import StepCost

RATES = (0.70, 0.45, 0.25, 0.15, 0.08)
KS = range(6)
LINES = {1: (8, 1), 4: (9, 1.5), 8: (12, 4)}  # milliseconds at K = 0, and of each draft
POINTS = {batch: {k: a + b * k for k in KS} for batch, (a, b) in LINES.items()}
BATCHES = (1, 4, 8)
GRIDS = ("seed", "untaxed", "moe")
SHIFTS = (0.0, -1.0, 1.0)


def make_world(**others):
    return World(StepCost(POINTS, batches=BATCHES), RATES, BATCHES, **others)


def alike(num_requests, length, every=0.0):
    """Requests of one length and no effect of their own, so much apart."""
    arrivals = [i * every for i in range(num_requests)]
    return Workload([length] * num_requests, arrivals, [0.0] * num_requests)


def adaptive():
    return GoodputPolicy(KS, None, Acceptance(5))


class Watched:
    """A policy whose rounds are kept."""

    is_learning = True

    def __init__(self, policy):
        self.policy, self.loads, self.rounds = policy, [], []
        self.choices = policy.choices

    def begin(self, replay):
        self.policy.begin(replay)

    def choose(self, load):
        self.loads.append(load)
        return self.policy.choose(load)

    def observe(self, outcome):
        self.rounds.append(outcome)
        self.policy.observe(outcome)


def tokens_of(outcome):
    return sum((v.num_accepted + 1) * count for v, count in outcome.verdicts.items())


# --- the simulator itself -------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adaptive, lambda: StaticPolicy(2), lambda: None])
def test_a_seed_says_all(make):
    workload = Workload.rollout(random.Random(0), 12, median=100)
    world = make_world(shift=-1)
    first, again = (simulate(world, workload, make(), seed=3) for _ in range(2))
    assert first == again and len(first.trace) > 100
    assert first.trace != simulate(world, workload, make(), seed=4).trace
    assert workload == Workload.rollout(random.Random(0), 12, median=100)
    assert workload != Workload.rollout(random.Random(1), 12, median=100)


@pytest.mark.parametrize("k", [0, 2, 5])
def test_every_token_is_made_once(k):
    workload = Workload.rollout(random.Random(0), 30, median=100)
    watched = Watched(StaticPolicy(k))
    outcome = simulate(make_world(), workload, watched)
    assert outcome.num_tokens == sum(workload.lengths)
    last = outcome.num_tokens - sum(map(tokens_of, watched.rounds))
    assert 1 <= last <= k + 1  # of the one round that nobody learned of
    assert sum(outcome.k_histogram.values()) == len(outcome.trace) == len(watched.rounds) + 1
    assert sum(outcome.ms_by_batch.values()) == pytest.approx(outcome.makespan_ms)
    # No context is simulated: what is chosen by and what is learned from agree.
    assert {seen.num_context for seen in [*watched.loads, *watched.rounds]} == {0}


def test_a_round_is_learned_of_after_the_next_is_chosen():
    order = []

    class Noting(Watched):
        def choose(self, load):
            order.append("choose")
            return super().choose(load)

        def observe(self, outcome):
            order.append("observe")

    simulate(make_world(), alike(1, 20), Noting(StaticPolicy(1)))
    assert order[:5] == ["choose", "choose", "observe", "choose", "observe"]


@pytest.mark.parametrize("k", KS)
def test_a_static_k_alone_is_a_closed_form(k):
    """Tokens per round are AL(k); their spread gives the bound."""
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


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("num_requests, batch", [(1, 1), (3, 4), (4, 4), (8, 8)])
def test_regret_of_a_static_k_is_a_closed_form(k, num_requests, batch):
    outcome = simulate(make_world(), alike(num_requests, 3000), StaticPolicy(k), seed=2)
    goodput = [(1 + sum(RATES[:j])) / POINTS[batch][j] for j in KS]
    found = outcome.regret_by_batch[batch]
    assert found == pytest.approx(1 - goodput[k] / max(goodput), abs=1e-9)


@pytest.mark.parametrize("shift", [-1.0, 0.7])
def test_regret_round_by_round(shift):
    """From the trace and the tokens that a policy sees, as all requests are alike."""
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


def test_acceptance_shifts_when_half_of_all_tokens_are_there():
    """To nothing at all, so that it shows."""
    watched = Watched(StaticPolicy(3))
    outcome = simulate(make_world(shift=-60.0), alike(8, 1000), watched)
    came = list(accumulate(map(tokens_of, watched.rounds)))
    accepting = [came[i] for i, r in enumerate(watched.rounds) if any(v[1] for v in r.verdicts)]
    assert outcome.num_tokens == 8000
    assert 4000 - 8 <= accepting[-1] <= 4000 + 4 * 8
    assert 0 < outcome.regret_by_batch[8] < 1


@pytest.mark.parametrize("rates", [(0.5, 0.0, 0.0), (1.0, 1.0, 0.5), (0.0,)])
def test_drafts_that_always_stand_or_never(rates):
    """A profile may have such rates."""
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
    assert sum(outcome.ms_by_batch.values()) == pytest.approx(100 * 8)


# --- what policies reach --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def baselines():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module("baselines")


@pytest.fixture(scope="module")
def runs(baselines):
    """Outcomes by grid, shift and policy: run when first asked for."""

    @cache
    def run(grid, shift, name, num_seeds, num_requests=256):
        scenario = baselines.Scenario(grid, shift)
        return [baselines.run(scenario, name, seed, num_requests) for seed in range(num_seeds)]

    return run


def regret(outcomes):
    return fmean(outcome.regret for outcome in outcomes)


def makespan_ratio(outcomes, others):
    pairs = zip(outcomes, others, strict=True)
    return fmean(a.makespan_ms / b.makespan_ms for a, b in pairs)


SMALL = {"num_seeds": 2, "num_requests": 48}
SEEDS = 4  # of the slow ones
SIZES = [True, pytest.param(False, marks=pytest.mark.slow)]
RIVALS = ("table", "table of the seed", "thresholds")
ONE_GRID = [
    grid if grid == "seed" else pytest.param(grid, marks=pytest.mark.slow) for grid in GRIDS
]


@pytest.mark.parametrize("grid", ONE_GRID)
def test_the_oracle_regrets_nothing(runs, grid):
    """And nobody ends much before it, which takes the best round by round."""
    oracle = runs(grid, 0.0, "oracle", **SMALL)
    assert regret(oracle) == 0
    for name in ("adaptive", "table", *(f"K = {k}" for k in KS)):
        others = runs(grid, 0.0, name, **SMALL)
        assert 0 <= regret(others) < 1
        assert makespan_ratio(others, oracle) > 0.96  # few seeds: 2 % of noise


@pytest.mark.parametrize("is_small", SIZES)
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("grid", GRIDS)
def test_adaptive_regrets_little(runs, grid, shift, is_small):
    limit = 0.015 if grid == "seed" else 0.02
    sizes = SMALL if is_small else {"num_seeds": SEEDS}
    assert regret(runs(grid, shift, "adaptive", **sizes)) <= (0.03 if shift or is_small else limit)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("shift", [*SHIFTS, None])
@pytest.mark.parametrize("grid", GRIDS)
def test_adaptive_regrets_less_than(runs, grid, shift, name):
    assert regret(runs(grid, shift, "adaptive", SEEDS)) < regret(runs(grid, shift, name, SEEDS))


@pytest.mark.parametrize(
    "grid, is_small",
    [("seed", True), *(pytest.param(g, False, marks=pytest.mark.slow) for g in GRIDS)],
)
def test_adaptive_is_as_fast_as_no_drafts_if_none_is_accepted(runs, grid, is_small):
    sizes = SMALL if is_small else {"num_seeds": SEEDS}
    pair = [runs(grid, None, name, **sizes) for name in ("adaptive", "K = 0")]
    assert makespan_ratio(*pair) <= (1.015 if is_small else 1.01)
    assert max(a.makespan_ms / b.makespan_ms for a, b in zip(*pair, strict=True)) <= 1.02


@pytest.mark.slow
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("grid", GRIDS)
def test_replays_that_mislead_are_survived(runs, grid, shift):
    """They say that drafts cost a fifth less than they do."""
    assert regret(runs(grid, shift, "misled", SEEDS)) <= 0.04


def long_tail(rng):
    """One request that goes on for long after all others."""
    lengths = [12_000, *(rng.randint(100, 400) for _ in range(63))]
    return Workload(lengths, [0.0] * len(lengths), [rng.gauss(0, 0.8) for _ in lengths])


def arriving(rng):
    """Requests that arrive all the time."""
    return Workload.stream(rng, 200, per_second=2.0, median=300)


@pytest.mark.slow
@pytest.mark.parametrize("make, limit", [(long_tail, 0.02), (arriving, 0.03)])
@pytest.mark.parametrize("grid", GRIDS)
def test_other_loads_are_no_exception(baselines, grid, make, limit):
    world = baselines.Scenario(grid).world()
    outcomes = [
        simulate(world, make(random.Random(seed)), adaptive(), seed + 1000) for seed in range(SEEDS)
    ]
    assert regret(outcomes) <= limit
    if make is long_tail:
        assert all(o.ms_by_batch[1] > 0.8 * o.makespan_ms for o in outcomes)
        assert fmean(o.regret_by_batch[1] for o in outcomes) <= 0.02
