"""Seeds of requests, 32 bits each, from those that users give."""

import numpy as np

WORD = 2**32


def folded_seed(seed: int) -> int:
    """The 32 bits of any seed of 64 bits.

    Seeds of 0..2**32 - 1 are their own. Others, as the two words of their two's complement, are
    mixed by NumPy's `SeedSequence`.
    """
    high, low = divmod(int(seed) % WORD**2, WORD)
    # The third word, as seeds derived by a number have two.
    return low if high == 0 else int(np.random.SeedSequence([low, high, 1]).generate_state(1)[0])


def derived_seed(seed: int, number: int) -> int:
    """The seed of a request by its number, or of a sample by its number."""
    return int(np.random.SeedSequence([folded_seed(seed), number]).generate_state(1)[0])
