"""Adaptive K compared with every constant K, at constant loads and times measured on a GPU."""

from functools import cache

import numpy as np
import pytest
from host.speculation.steady_loads import serve

from specjax.host.speculation.methods import adaptive_policy

SEEDS, ROUNDS = 4, 600
COLD, STEADY, ALL = slice(0, 200), slice(300, ROUNDS), slice(None)
BATCHES = (1, 4, 16, 64, 256)


@cache
def runs(batch, law, wrong_ms=None):
    """Return the rounds of each seed. `wrong_ms` is a wrong time of replays at K = 3, or None."""
    wrong = wrong_ms and {3: wrong_ms}
    return [serve(adaptive_policy(5), batch, law, ROUNDS, seed, wrong) for seed in range(SEEDS)]


def parts(batch, law, rounds, wrong_ms=None):
    """Return, per seed, the speed in these rounds divided by the speed of the best constant K."""
    return [run.of_best_static(batch, law, rounds) for run in runs(batch, law, wrong_ms)]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "law, rounds, median, least",
    [
        ("as measured", STEADY, 0.99, 0.97),
        ("as measured", COLD, 0.97, 0.94),
        ("falling", ALL, 0.99, 0.97),
        ("falling", COLD, 0.97, 0.94),
    ],
)
def test_it_ends_at_the_best_static_k(batch, law, rounds, median, least):
    """Adaptive K also follows falling acceptance, and loses little at the start."""
    found = parts(batch, law, rounds)
    assert np.median(found) >= median and min(found) >= least


def test_a_draft_that_only_replays_find_cheap_is_found_out():
    """At batch size 4, K = 2 and 3 have 16 padded rows, but K = 3 takes 18 % longer in serving."""
    for rounds, least in (STEADY, 0.985), (COLD, 0.96):
        assert min(parts(4, "as measured", rounds, wrong_ms=7.88)) >= least


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
def test_noise_does_not_make_it_flap(batch):
    for served in runs(batch, "as measured"):
        assert np.mean(np.diff(served.ks[STEADY]) != 0) <= 0.1  # to try another takes two
