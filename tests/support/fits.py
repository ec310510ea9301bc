"""Tests whether counts of random draws fit given probabilities."""

import numpy as np
from scipy import stats

LEAST = 20.0  # draws expected in a cell; rarer outcomes share one cell
FIXED_SEED = 1e-4  # smallest p-value that passes, if every run has the same seed
NEW_SEED = 1e-10  # the same for new seeds: with 100 tests, 1 run in 1e8 is a false alarm


def pvalue(counts: np.ndarray, probs: np.ndarray) -> float:
    """Return the p-value of the likelihood-ratio test; 0 if something impossible was counted.

    If at least `LEAST` draws are expected in each cell, the statistic's tail is at most about ten
    times the tail of the chi-square distribution, down to p-values of 1e-10. The tail of Pearson's
    statistic is much heavier.
    """
    counts, expected = np.ravel(counts), np.ravel(probs) / np.sum(probs) * np.sum(counts)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < LEAST
    if 0 < expected[rare].sum() < LEAST:  # too little to stand alone
        rare |= expected == expected[~rare].min()
    counts, expected = (np.array([*x[~rare], x[rare].sum()]) for x in (counts, expected))
    kept = expected > 0
    assert kept.sum() > 1, "too few draws to tell anything"
    return stats.power_divergence(counts[kept], expected[kept], lambda_="log-likelihood").pvalue
