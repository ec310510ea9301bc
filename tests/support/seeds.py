"""Seeds that are different in every run, and can be repeated."""

import os
from collections.abc import Callable

import numpy as np

VARIABLE = "SPECJAX_TEST_SEED"  # of the environment: repeats a run


def new_seed(record_property: Callable[[str, object], None]) -> int:
    """Return a random seed of 32 bits, and add it to the report of the test run.

    If the environment variable `VARIABLE` has a seed, return this seed.
    """
    given = os.environ.get(VARIABLE)
    seed = int(given) if given else int(np.random.SeedSequence().entropy) % 2**32
    record_property(VARIABLE, seed)
    return seed
