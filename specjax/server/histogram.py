"""A histogram, as Prometheus defines it."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts values by bucket. It is not thread-safe: use it only on the event loop.

    `bounds` are the upper bounds of all buckets but the last, in ascending order.
    """

    def __init__(self, bounds: Sequence[float]):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value in its bucket."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return pairs (upper bound, number of values up to it), and the sum of all values."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return buckets, self._sum
