"""Derives the 32-bit seeds of requests from users' seeds."""

import numpy as np

WORD = 2**32


def folded_seed(seed: int) -> int:
    """Return a 32-bit seed for a seed of up to 64 bits.

    Seeds in 0..2**32 - 1 are unchanged. Any other seed, such as a negative one, is taken modulo
    2**64, and NumPy's `SeedSequence` mixes its two 32-bit words.
    """
    high, low = divmod(int(seed) % WORD**2, WORD)
    # A third word, because `derived_seed` uses two.
    return low if high == 0 else int(np.random.SeedSequence([low, high, 1]).generate_state(1)[0])


def derived_seed(seed: int, number: int) -> int:
    """Return the seed of request or sample number `number`, derived from `seed`."""
    return int(np.random.SeedSequence([folded_seed(seed), number]).generate_state(1)[0])
