"""Divides lengths of context into buckets.

Drafters are trained on short texts, so that fewer drafts are accepted in long contexts. Acceptance
rates and times of rounds are learned for each bucket of lengths.
"""

from bisect import bisect_right

BOUNDS = (2048, 4096, 8192, 16384, 32768, 65536)  # the first length of each bucket after the first


def context_bucket(num_tokens: float) -> int:
    """Return the number of the bucket of a request with `num_tokens` tokens, from 0 on."""
    return bisect_right(BOUNDS, num_tokens)


def first_length(bucket: int) -> int:
    """Return the smallest number of tokens in a bucket."""
    return (0, *BOUNDS)[bucket]
