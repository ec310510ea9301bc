"""Times of rounds compared with NumPy's interpolation, and learned times with true times."""

import random
from itertools import pairwise, product

import numpy as np
import pytest
from host.speculation.baselines import BATCHES, KS
from host.speculation.baselines import SEED_MS as GRID

from specjax.host.speculation import step_cost
from specjax.host.speculation.step_cost import StepCost, _monotone, _rising


def bilinear(batch, k):
    """Return the time by NumPy's interpolation of `GRID`, which is constant outside of it."""
    rows = [np.interp(k, list(row), list(row.values())) for row in GRID.values()]
    return np.interp(batch, list(GRID), rows)


def factor(rng, noise=0.03):
    return max(0.1, 1 + noise * rng.gauss(0, 1))


def test_linear_in_both_directions_or_that_of_the_round_that_it_is_padded_to():
    exact, padded = StepCost(GRID), StepCost(GRID, ks=KS, batches=BATCHES)
    for batch, k in product(range(1, 257), KS):
        larger = min(b for b in BATCHES if b >= batch)
        assert padded.padded(batch) == larger
        assert exact.ms(batch, k) == pytest.approx(bilinear(batch, k), rel=1e-12)
        assert padded.ms(batch, k) == pytest.approx(bilinear(larger, k), rel=1e-12)


def test_beyond_the_points():
    """Times are constant beyond the batch sizes and below the Ks, and linear above the Ks."""
    cost = StepCost({4: {1: 10.0, 3: 14.0}, 8: {1: 12.0, 3: 20.0}})
    assert [cost.ms(batch, 1) for batch in (1, 3, 4, 8, 9, 10**6)] == [10, 10, 10, 12, 12, 12]
    assert [cost.ms(4, k) for k in (0, 4, 5, 9)] == [10, 16, 18, 26]
    assert cost.ms(6, 5) == pytest.approx((18 + 28) / 2)
    padded = StepCost({4: {1: 10.0}, 8: {1: 12.0}}, batches=(2, 6))
    assert (padded.ms(1, 1), padded.ms(100, 1), padded.padded(100)) == (10, 11, 6)


@pytest.mark.parametrize(
    "points, expected",
    [
        ({8: {3: 10.0}}, {(1, 0): 10, (8, 3): 10, (64, 7): 10}),
        ({4: {0: 9.0, 1: 10.0, 3: 14.0}}, {(4, 5): 18}),
        ({8: {0: 6.0, 2: 10.0}}, {(1, 1): 8, (64, 1): 8, (8, 3): 12}),
        ({2: {0: 6.0, 2: 7.0}}, {(2, 1): 6.5, (2, 3): 7.5, (2, 7): 9.5}),
        ({1: {2: 6.0}, 3: {2: 10.0}}, {(2, 0): 8, (2, 5): 8, (9, 2): 10}),
        ({1: {0: 5.0, 4: 5.0}, 9: {0: 5.0, 4: 5.0}}, {(5, 2): 5, (1, 4): 5, (20, 9): 5}),
        ({1: {0: 6.0, 4: 10.0}, 3: {0: 8.0, 2: 11.0, 4: 12.0}}, {(1, 2): 8, (2, 2): 9.5}),
    ],
    ids=[
        "one point",
        "uneven Ks",
        "one batch size",
        "a flat line",
        "one K",
        "all alike",
        "different Ks",
    ],
)
@pytest.mark.parametrize("is_learned", [False, True])
def test_few_points(points, expected, is_learned):
    cost = StepCost(points)
    if is_learned:  # what is as expected changes nothing
        for batch, row in points.items():
            for k, ms in row.items():
                cost.observe(batch, k, 0, ms)
    for (batch, k), ms in expected.items():
        assert cost.ms(batch, k) == pytest.approx(ms)


def test_what_falls_is_taken_for_noise():
    cost = StepCost({1: {0: 6.0, 1: 9.0, 2: 8.0}, 4: {0: 5.0, 1: 10.0, 2: 12.0}})
    assert [cost.ms(1, k) for k in range(3)] == [5.5, 8.5, 8.5]
    assert [cost.ms(4, k) for k in range(3)] == [5.5, 10.0, 12.0]


@pytest.mark.parametrize("seed", range(20))
def test_rising_is_the_nearest_by_least_squares(seed):
    """The best fit has blocks of equal values, each the mean of its block: all blocks are tried."""
    rng = random.Random(seed)
    values = [float(rng.randint(0, 9)) for _ in range(rng.randint(1, 7))]
    fits = []
    for cuts in product((False, True), repeat=len(values) - 1):
        borders = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(values)]
        fit = [np.mean(values[a:b]) for a, b in pairwise(borders) for _ in range(a, b)]
        if all(a <= b for a, b in pairwise(fit)):
            fits.append(fit)
    errors = [np.sum(np.square(np.subtract(fit, values))) for fit in fits]
    np.testing.assert_allclose(_rising(values), fits[int(np.argmin(errors))])


@pytest.mark.parametrize("seed", range(20))
def test_both_directions_rise(seed):
    rows = np.random.default_rng(seed).integers(0, 20, (5, 4)).astype(float)
    found = np.array(_monotone(rows.tolist()))
    assert (np.diff(found, axis=0) >= 0).all() and (np.diff(found, axis=1) >= 0).all()
    np.testing.assert_allclose(_monotone(found.tolist()), found)
    assert np.mean(found) == pytest.approx(rows.mean())


@pytest.mark.parametrize("seed", range(10))
def test_it_is_the_posterior_mean_of_a_gaussian_model(seed):
    """Computed by linear algebra: shared and own terms and the noise of rounds are Gaussian."""
    rng, n = np.random.default_rng(seed), 4
    points = [10.0, 20.0, 40.0, 80.0]  # so far apart that none has to be held between others
    cost = StepCost({1: dict(enumerate(points))})
    counts = rng.integers(0, 5, n)
    levels = rng.normal(0, 0.03, n)
    for k in np.repeat(np.arange(n), counts):
        cost.observe(1, int(k), 0, points[k] * np.exp(levels[k]))
    own, shared = step_cost.REPLAY_SPREAD**2, step_cost.REPLAY_SPREAD**2 / step_cost._SHARED_WEIGHT
    prior = own * np.eye(n) + shared
    at = np.repeat(np.eye(n), counts, axis=0)
    noise = step_cost.ROUND_SPREAD**2 * np.eye(len(at))
    gain = prior @ at.T @ np.linalg.inv(at @ prior @ at.T + noise)
    found = [np.log(cost.ms(1, k) / points[k]) for k in range(n)]
    np.testing.assert_allclose(found, gain @ at @ levels, atol=1e-9)
    for k in range(n):
        variance = 1 / (1 / own + counts[k] / noise[0, 0] if len(at) else 1 / own)
        assert cost.spread(1, k) == pytest.approx(variance**0.5)
        assert cost.spread(1, k, 4000) == pytest.approx(0.06)  # no round of such a length


def test_what_was_served_is_believed():
    """This holds even if times do not rise with K: a GPU may run 4 rows faster than 3."""
    times = {0: 10.0, 1: 11.0, 2: 14.0, 3: 12.0}
    cost = StepCost({1: {k: 10.0 + k for k in times}})
    for _ in range(40):
        for k, ms in times.items():
            cost.observe(1, k, 0, ms)
    assert [cost.ms(1, k) for k in times] == pytest.approx(list(times.values()), rel=0.01)


def test_what_was_never_served_lies_between_what_was():
    cost = StepCost({1: {k: 10.0 + k for k in KS}}, batches=(1,))
    for _ in range(10):
        cost.observe(1, 1, 0, 12.5)  # dearer than K = 2 seemed to be
        cost.observe(1, 4, 0, 14.0)
    assert 12.4 <= cost.ms(1, 2) <= cost.ms(1, 3) <= 14.1
    assert cost.ms(1, 0) <= 12.5 and cost.ms(1, 5) >= 14.0


def test_other_batch_sizes_share_what_all_points_of_one_show():
    """An example is time of the host, which replays do not measure."""
    cost = StepCost(GRID, ks=KS, batches=BATCHES)
    for k in [*KS] * 3:
        cost.observe(16, k, 0, 1.1 * bilinear(16, k))
    for batch, k in product(BATCHES, KS):
        assert 1.06 < cost.ms(batch, k) / bilinear(batch, k) < 1.11


@pytest.mark.parametrize("count", [10, 40])
def test_what_was_served_stays_when_another_point_is_measured(count):
    cost = StepCost({8: {5: 20.0}}).widened(KS, (1, 8))
    for _ in range(count):
        cost.observe(8, 3, 0, 16.0)
    before = cost.ms(8, 3)
    cost.add(8, 0, 9.0)
    assert cost.ms(8, 3) == pytest.approx(before, rel=0.02)
    assert before == pytest.approx(16.0, rel=0.02)


ERRORS = {
    "a wrong cell": lambda batch, k: 1.3 if (batch, k) == (16, 2) else 1.0,
    "one below": lambda batch, k: 0.7 if (batch, k) == (16, 4) else 1.0,
    "drafts too dear": lambda batch, k: 1.25 if k else 1.0,
    "drafts too cheap": lambda batch, k: 0.75 if k else 1.0,
    "all twice": lambda batch, k: 2.0,
    "all half": lambda batch, k: 0.5,
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("batch", [1, 16, 256])
def test_a_wrong_start_is_corrected(error, batch):
    """After 80 rounds of each K, times and the ratios between Ks are right."""
    rng = random.Random(0)
    points = {b: {k: error(b, k) * bilinear(b, k) for k in KS} for b in BATCHES}
    cost = StepCost(points, batches=BATCHES)
    for _ in range(80):
        for k in rng.sample(KS, len(KS)):
            cost.observe(batch, k, 0, bilinear(batch, k) * factor(rng))
    found = [cost.ms(batch, k) / bilinear(batch, k) for k in KS]
    np.testing.assert_allclose(found, 1, atol=0.05)
    np.testing.assert_allclose(found / found[0], 1, atol=0.05)


def test_what_slows_all_is_learned_from_one():
    """The estimates of Ks that did not run since then change, too."""
    rng, cost = random.Random(1), StepCost(GRID, ks=KS, batches=BATCHES)
    for _ in range(200):
        cost.observe(64, 2, 0, bilinear(64, 2) * factor(rng))
    for _ in range(400):
        cost.observe(64, 2, 0, 1.5 * bilinear(64, 2) * factor(rng))
    for k in KS:
        assert cost.ms(64, k) / bilinear(64, k) == pytest.approx(1.5, rel=0.25)
        assert cost.ms(1, k) / bilinear(1, k) == pytest.approx(1.5, rel=0.25)
    assert cost.ms(64, 2) / bilinear(64, 2) == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("num_before, times", [(20, 100), (200, 0.01)])
def test_an_outlier_moves_nothing_much(num_before, times):
    rng, cost = random.Random(2), StepCost(GRID, ks=KS, batches=BATCHES)
    for i in range(num_before):
        cost.observe(16, i % 6, 0, bilinear(16, i % 6) * factor(rng))
    before = {(b, k): cost.ms(b, k) for b in BATCHES for k in KS}
    cost.observe(16, 3, 0, times * bilinear(16, 3))
    for (b, k), ms in before.items():
        assert cost.ms(b, k) == pytest.approx(ms, rel=0.06 if (b, k) == (16, 3) else 0.03)


@pytest.mark.parametrize("num_before", [0, 4])
def test_an_outlier_is_forgotten_even_if_it_comes_first(num_before):
    rng, cost = random.Random(3), StepCost(GRID, ks=KS, batches=BATCHES)
    for i in range(400):
        ms = bilinear(16, i % 6) * (100 if i == num_before else factor(rng))
        cost.observe(16, i % 6, 0, ms)
    for k in KS:
        assert cost.ms(16, k) == pytest.approx(bilinear(16, k), rel=0.1)


@pytest.mark.parametrize("is_known", [True, False])
def test_context_is_not_mistaken_for_drift(is_known):
    rng = random.Random(4)
    cost = StepCost(GRID, ks=KS, ms_per_context_token=1e-4 if is_known else 0.0)
    for i in range(300):
        num_context = rng.choice([1000, 60000])
        ms = bilinear(16, i % 6) + 1e-4 * num_context
        cost.observe(16, i % 6, num_context, ms)
    close = [cost.ms(16, k) == pytest.approx(bilinear(16, k), rel=1e-9) for k in KS]
    assert all(close) if is_known else not any(close)
    for k in KS:  # it costs the same at any of them
        more = cost.ms(16, k, 30000) - cost.ms(16, k)
        assert more == pytest.approx(3.0 * is_known)


def test_times_of_long_contexts_are_learned_apart():
    """If long contexts take more time than known, times of short contexts do not change.

    Times of other batch sizes do not change either.
    """
    known, added = 1e-5, 4e-5  # milliseconds per token
    cost = StepCost(GRID, ks=KS, ms_per_context_token=known, ms_per_context_draft=known)
    before = [cost.ms(64, 2, 64 * 1000), cost.ms(16, 2, 16 * 1000)]
    assert cost.context_ms(3, 1000) == pytest.approx(4e-2)
    for _ in range(60):
        for length, extra in (1000, 0.0), (70_000, added):
            context = 16 * length
            cost.observe(
                16, 2, context, bilinear(16, 2) + cost.context_ms(2, context) + extra * context
            )
    true = bilinear(16, 2) + (3 * known + added) * 16 * 70_000
    assert cost.ms(16, 2, 16 * 70_000) == pytest.approx(true, rel=0.05)
    assert cost.ms(16, 0, 16 * 70_000) > 1.5 * (bilinear(16, 0) + known * 16 * 70_000)  # not served
    after = [cost.ms(64, 2, 64 * 1000), cost.ms(16, 2, 16 * 1000)]
    assert after == pytest.approx(before, rel=0.1)
