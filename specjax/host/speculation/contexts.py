"""Divides lengths of context into buckets.

Drafters are usually trained on short texts, so fewer drafts are accepted in long contexts. For this
reason, acceptance rates and times of rounds are learned separately for each bucket of lengths.
"""

from bisect import bisect_right
from collections.abc import Sequence

BOUNDS = (2048, 4096, 8192, 16384, 32768, 65536)  # where each bucket after the first begins
FIRST_LENGTHS = (0, *BOUNDS)  # the smallest length in each bucket


def context_bucket(num_tokens: float) -> int:
    """Return the number, counted from 0, of the bucket that contains `num_tokens`."""
    return bisect_right(BOUNDS, num_tokens)


def context_buckets(lengths: Sequence[int]) -> list[int]:
    """Return the number of each length's bucket; see `context_bucket`."""
    if max(lengths, default=0) < BOUNDS[0]:  # the usual case, made fast
        return [0] * len(lengths)
    return [context_bucket(length) for length in lengths]
