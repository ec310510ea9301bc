"""The measure of repetition in outputs, compared with its definition."""

import random

from specjax.bench.repetition import count_repeated, repeated_share


def test_count_matches_the_definition():
    rng = random.Random(0)
    for _ in range(300):
        length, vocab, n = rng.randrange(40), rng.randrange(1, 4), rng.randrange(1, 10)
        tokens = [rng.randrange(vocab) for _ in range(length)]
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        repeated = sum(gram in grams[:i] for i, gram in enumerate(grams))
        assert count_repeated(tokens, n) == (repeated, len(grams))
    assert repeated_share([7] * 18) == 10 / 11
    assert repeated_share([1, 2, 3]) == 0.0  # too short for one
