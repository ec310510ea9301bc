"""Tests whether counts of random draws fit given probabilities."""

import numpy as np
from scipy import stats

LEAST = 20.0  # expected in a cell of its own; rarer ones are counted together
FIXED_SEED = 1e-4  # least p-values: of runs that come to the same every time
NEW_SEED = 1e-10  # and of those that do not: of a hundred a run, one in 1e8 runs is a false alarm


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
