"""Milliseconds of a round, by batch size, K and context.

A round of B requests and K drafts runs B (K + 1) tokens through the target. Its time is known at
points, from a profile or from replays of the compiled steps, and refined by the times of rounds.
Between points it is linear in both directions; it never falls as tokens are added.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

_DRIFT_GAIN, _OWN_GAIN = 0.05, 0.05
_REPLAYS, _MOST_SEEN = 4, 100  # weight of a point in rounds: at the start, and at most
_NOTICEABLE = 0.005  # of a log ratio
_CLIP = 0.25  # of a log ratio: a time further off moves estimates no more than this

Points = Mapping[int, Mapping[int, float]]  # milliseconds by batch size and K


class StepCost:
    """Estimates times of rounds, and learns from observed ones.

    What is learned has two parts, as factors: a drift that all rounds share (clocks, neighbours,
    longer texts), so that a K that has not run lately is judged like the others, and what is a
    point's own.
    """

    def __init__(
        self,
        points: Points,
        *,
        ks: Sequence[int] = (),
        batches: Sequence[int] = (),
        ms_per_context_token: float = 0.0,
    ):
        """`ks` become points, too. `batches` are the sizes to which rounds are padded; without them
        nothing is padded."""
        self._measured = {batch: dict(column) for batch, column in points.items()}
        self.ks = sorted({*ks, *(k for column in points.values() for k in column)})
        rows = {batch: [_along_k(points[batch], k) for k in self.ks] for batch in sorted(points)}
        self._is_padded = len(batches) > 0
        if batches:
            rows = {batch: _between(rows, batch) for batch in sorted(batches)}
        self.batches = list(rows)
        self._points = _monotone(list(rows.values()), [[1] * len(self.ks)] * len(rows))
        self._own = [[0.0] * len(self.ks) for _ in rows]
        self._drawn = [list(owns) for owns in self._own]  # as the grid has them
        self._num_seen = [[0] * len(self.ks) for _ in rows]
        self._drift, self._num_all = 0.0, 0
        self._ms_per_context_token = ms_per_context_token
        self._grid = dict(zip(self.batches, self._points, strict=True))

    def widened(self, ks: Sequence[int], batches: Sequence[int]) -> "StepCost":
        """The same points and their extrapolation to others, without what was learned."""
        per_token = self._ms_per_context_token
        return StepCost(self._measured, ks=ks, batches=batches, ms_per_context_token=per_token)

    def add(self, batch_size: int, k: int, ms: float) -> None:
        """Set the time of a round of one of `batches` and one of `ks`, without context.

        Ks that were not measured at a batch size grow as at the largest measured batch size.
        """
        self._measured.setdefault(batch_size, {})[k] = ms
        whole = self._measured[max(self._measured)]
        rows = {}
        for batch in sorted(self._measured):
            ratios = {k: ms / _along_k(whole, k) for k, ms in self._measured[batch].items()}
            rows[batch] = [_line(ratios, k) * _along_k(whole, k) for k in self.ks]
        points = [_between(rows, batch) for batch in self.batches]
        self._points = _monotone(points, [[1] * len(self.ks)] * len(points))
        row, column = self._row(batch_size), self.ks.index(k)
        self._own[row][column], self._num_seen[row][column] = 0.0, 0
        self._draw_grid()

    def ms(self, batch_size: int, k: int, num_context: float = 0) -> float:
        """Milliseconds of a round of k drafts, of requests with so many tokens before altogether.

        Batch sizes beyond the points and Ks below take the nearest; Ks above are extrapolated.
        """
        if self._is_padded:
            row = self._grid[self.batches[self._row(batch_size)]]
        else:
            row = _between(self._grid, batch_size)
        at_k = _along_k(dict(zip(self.ks, row, strict=True)), k)
        return (at_k + self._ms_per_context_token * num_context) * math.exp(self._drift)

    def padded(self, batch_size: int) -> int:
        """The batch size at which such a round is counted."""
        return self.batches[self._row(batch_size)]

    def observe(self, batch_size: int, k: int, num_context: float, ms: float) -> None:
        """Learn from the time of a round of one of `ks`."""
        row, column = self._row(batch_size), self.ks.index(k)
        expected = self._points[row][column] + self._ms_per_context_token * num_context
        surprise = math.log(ms / expected) - self._drift - self._own[row][column]
        surprise = min(max(surprise, -_CLIP), _CLIP)
        gain = max(1 / (1 + self._num_all), _DRIFT_GAIN)
        own_gain = max(1 / (1 + _REPLAYS + self._num_seen[row][column]), _OWN_GAIN)
        self._drift += gain * surprise
        self._own[row][column] += own_gain * (1 - gain) * surprise
        self._num_all += 1
        seen = self._num_seen[row][column] = self._num_seen[row][column] + 1
        # The grid is redrawn when a point's value has changed, or its weight has doubled.
        has_moved = abs(self._own[row][column] - self._drawn[row][column]) > _NOTICEABLE
        if has_moved or seen.bit_count() == 1:
            self._draw_grid()

    def _draw_grid(self) -> None:
        """Points with their corrections, made monotone."""
        self._drawn = [list(owns) for owns in self._own]
        corrected = [
            [point * math.exp(own) for point, own in zip(points, owns, strict=True)]
            for points, owns in zip(self._points, self._own, strict=True)
        ]
        weights = [[_REPLAYS + min(seen, _MOST_SEEN) for seen in seens] for seens in self._num_seen]
        self._grid = dict(zip(self.batches, _monotone(corrected, weights), strict=True))

    def _row(self, batch_size: int) -> int:
        return min(bisect_left(self.batches, batch_size), len(self.batches) - 1)


def _between(rows: Mapping[int, Sequence[float]], batch: int) -> list[float]:
    """The row of a batch size, from those around it."""
    return [_line({b: row[i] for b, row in rows.items()}, batch) for i in range(_width(rows))]


def _width(rows: Mapping[int, Sequence[float]]) -> int:
    return len(next(iter(rows.values())))


def _along_k(points: Mapping[int, float], k: int) -> float:
    ks = sorted(points)
    if k <= ks[-1] or len(ks) == 1:
        return _line(points, k)
    slope = (points[ks[-1]] - points[ks[-2]]) / (ks[-1] - ks[-2])
    return points[ks[-1]] + max(slope, 0.0) * (k - ks[-1])


def _line(points: Mapping[int, float], x: float) -> float:
    """Linear between points, and flat beyond them."""
    xs = sorted(points)
    if x <= xs[0]:
        return points[xs[0]]
    for a, b in pairwise(xs):
        if x <= b:
            return points[a] + (points[b] - points[a]) * (x - a) / (b - a)
    return points[xs[-1]]


def _monotone(
    rows: Sequence[Sequence[float]], weights: Sequence[Sequence[float]]
) -> list[list[float]]:
    """The nearest rows, by weight, that rise to the right and downwards.

    A last isotonic regression with equal weights, in one direction after the other, keeps both
    orders; heavy points move little by then.
    """
    for by_weight in (weights, [[1.0] * len(row) for row in rows]):
        columns = zip(zip(*rows, strict=True), zip(*by_weight, strict=True), strict=True)
        risen = zip(*(_rising(column, weight) for column, weight in columns), strict=True)
        rows = [_rising(row, weight) for row, weight in zip(risen, by_weight, strict=True)]
    return [list(row) for row in rows]


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Isotonic regression: pool adjacent violators (Ayer et al. 1955)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, count
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, v, m), (b, w, n) = pools[-2:]
            pools[-2:] = [((v * a + w * b) / (v + w), v + w, m + n)]
    return [mean for mean, _, count in pools for _ in range(count)]
