"""How much an output repeats itself. Loops are easy to draft and flatter acceptance."""

from collections.abc import Sequence


def count_repeated(tokens: Sequence[int], n: int = 8) -> tuple[int, int]:
    """N-grams of `tokens` that occurred earlier in it, and n-grams in all."""
    total = max(0, len(tokens) - n + 1)
    distinct = {tuple(tokens[i : i + n]) for i in range(total)}
    return total - len(distinct), total


def repeated_share(tokens: Sequence[int], n: int = 8) -> float:
    """Share of the n-grams of `tokens` that occurred earlier in it; 0 where there are none."""
    repeated, total = count_repeated(tokens, n)
    return repeated / total if total else 0.0
