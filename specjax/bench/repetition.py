"""Measures repetition in outputs. Loops are easy to draft and inflate acceptance rates."""

from collections.abc import Sequence


def count_repeated(tokens: Sequence[int], n: int = 8) -> tuple[int, int]:
    """Return the number of n-grams that occurred earlier in `tokens`, and of all n-grams."""
    total = max(0, len(tokens) - n + 1)
    distinct = {tuple(tokens[i : i + n]) for i in range(total)}
    return total - len(distinct), total


def repeated_share(tokens: Sequence[int], n: int = 8) -> float:
    """Return the fraction of n-grams that occurred earlier in `tokens`; 0 without n-grams."""
    repeated, total = count_repeated(tokens, n)
    return repeated / total if total else 0.0
