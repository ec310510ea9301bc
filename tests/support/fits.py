"""Counts of random draws against what they should be."""

import numpy as np
from scipy import stats

LEAST = 20.0  # expected in a cell of its own; rarer ones are counted together
FIXED_SEED = 1e-4  # least p-values: of runs that come to the same every time
NEW_SEED = 1e-10  # and of those that do not: of a hundred a run, one in 1e8 runs is a false alarm


def pvalue(counts: np.ndarray, probs: np.ndarray) -> float:
    """Of the likelihood-ratio test; 0 where something impossible was counted.

    Where cells expect `LEAST` draws, its tail is at most about ten times chi-square's at 1e-10;
    that of Pearson's statistic grows much heavier.
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


def detectable(count: int, num_cells: int, least: float, power: float = 0.99) -> float:
    """The shift between two of `num_cells` equal cells that so many draws find with `power`.

    A total variation: what one of the cells has too much and another too little.
    """
    df = num_cells - 1
    bound, low, high = stats.chi2.isf(least, df), 0.0, 1e4
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if stats.ncx2.sf(bound, df, middle) < power else (low, middle)
    return float(np.sqrt(high / (2 * num_cells * count)))
