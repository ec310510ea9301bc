"""Seeds of runs that are never the same twice, and can be repeated."""

import os
from collections.abc import Callable

import numpy as np

VARIABLE = "SPECJAX_TEST_SEED"  # of the environment: repeats a run


def new_seed(record_property: Callable[[str, object], None]) -> int:
    """A seed of 32 bits that no run had before, which the end of the run reports."""
    given = os.environ.get(VARIABLE)
    seed = int(given) if given else int(np.random.SeedSequence().entropy) % 2**32
    record_property(VARIABLE, seed)
    return seed
