"""Milliseconds of a round, by batch size, K and context.

A round of B requests and K drafts runs B (K + 1) tokens through the target. Its time is known at
points, from a profile or from replays of the compiled steps; between them it is linear in both
directions, and never falls as tokens are added.

Times of rounds that are served replace these. The logarithm of a served time over the replayed one
is taken for a sum of what all points of a batch size share (as the host's part), what is a point's
own, and noise. The estimate is the mean that follows (a random-effects model): a point that was
served a few times goes by these alone, one that never was by its replay and what the others share.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median

REPLAY_SPREAD, ROUND_SPREAD = 0.06, 0.04  # standard deviations of logarithms: own part, noise
_NUM_KEPT = 31  # last rounds of a point, whose median counts
_CLIP = 0.15  # of a log ratio: a time further off counts as this
_SETTLED, _DRIFT_GAIN = 5, 0.15  # rounds after which a point tells of drift, and how much
_SHARED_WEIGHT = 0.25  # of what is expected to be shared, in points

Column = Mapping[int, float]  # milliseconds by K
Points = Mapping[int, Column]  # by batch size


class StepCost:
    """Estimates times of rounds, and learns from observed ones.

    A drift is shared by all points (clocks, neighbours, longer texts), so that a K that has not run
    lately is judged like the others.
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
        self._points = _monotone(list(rows.values()))
        self.ms_per_context_token = ms_per_context_token
        self._drift = 0.0
        self._rows = [_Row(points) for points in _monotone(list(rows.values()))]
        self._known: dict[int, tuple[Column, Column]] = {}  # of rows, since the last round

    def widened(self, ks: Sequence[int], batches: Sequence[int]) -> "StepCost":
        """The same points and their extrapolation to others, without what was learned."""
        per_token = self.ms_per_context_token
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
        points = _monotone([_between(rows, batch) for batch in self.batches])
        for row, times in zip(self._rows, points, strict=True):
            row.move(times)
        self._row(batch_size).forget(self.ks.index(k))
        self._known.clear()

    def ms(self, batch_size: int, k: int, num_context: float = 0) -> float:
        """Milliseconds of a round of k drafts, of requests with so many tokens before altogether.

        Batch sizes beyond the points and Ks below take the nearest; Ks above are extrapolated.
        """
        if self._is_padded:
            points, estimates = self._estimates(self._index(batch_size))
        else:
            both = zip(*map(self._estimates, range(len(self.batches))), strict=True)
            points, estimates = (self._between(columns, batch_size) for columns in both)
        point, estimate = _along_k(points, k), _along_k(estimates, k)
        context = self.ms_per_context_token * num_context
        return estimate * (1 + context / point) * math.exp(self._drift)

    def spread(self, batch_size: int, k: int) -> float:
        """The standard deviation of the estimate's logarithm, for one of `ks`."""
        num_served = len(self._row(batch_size).served[self.ks.index(k)])
        return (REPLAY_SPREAD**-2 + num_served * ROUND_SPREAD**-2) ** -0.5

    def padded(self, batch_size: int) -> int:
        """The batch size at which such a round is counted."""
        return self.batches[self._index(batch_size)]

    def observe(self, batch_size: int, k: int, num_context: float, ms: float) -> None:
        """Learn from the time of a round of one of `ks`."""
        index, column = self._index(batch_size), self.ks.index(k)
        row, (points, estimates) = self._rows[index], self._estimates(index)
        expected = row.points[column] + self.ms_per_context_token * num_context
        surprise = math.log(ms / expected) - self._drift
        if len(row.served[column]) >= _SETTLED:
            drift = _DRIFT_GAIN * _clipped(surprise - row.levels[column])
            self._drift += drift
            surprise -= drift
        now = math.log(estimates[k] / points[k])
        row.add(column, now + _clipped(surprise - now))
        self._known.clear()

    def _estimates(self, index: int) -> tuple[Column, Column]:
        """A row's points and their estimates."""
        if index not in self._known:
            row = self._rows[index]
            both = row.points, row.estimates(self._elsewhere(row))
            points, estimates = (dict(zip(self.ks, times, strict=True)) for times in both)
            self._known[index] = points, estimates
        return self._known[index]

    def _between(self, columns: Sequence[Column], batch_size: int) -> Column:
        rows = {b: list(column.values()) for b, column in zip(self.batches, columns, strict=True)}
        return dict(zip(self.ks, _between(rows, batch_size), strict=True))

    def _elsewhere(self, row: "_Row") -> float:
        """What points of other batch sizes share."""
        others = [other for other in self._rows if other is not row]
        weight = sum(other.weight for other in others)
        return sum(other.total for other in others) / (weight + _SHARED_WEIGHT)

    def _index(self, batch_size: int) -> int:
        return min(bisect_left(self.batches, batch_size), len(self.batches) - 1)

    def _row(self, batch_size: int) -> "_Row":
        return self._rows[self._index(batch_size)]


class _Row:
    """The points of a batch size and what was served of them, as logarithms of ratios to them."""

    def __init__(self, points: Sequence[float]):
        self.points = points
        self.served = [deque(maxlen=_NUM_KEPT) for _ in points]
        self.levels = [0.0 for _ in points]  # medians of those
        self.weight = self.total = 0.0  # of the levels, see `_weight`

    def add(self, column: int, surprise: float) -> None:
        """Note a round."""
        self.served[column].append(surprise)
        self.levels[column] = median(self.served[column])
        self._sum()

    def move(self, points: Sequence[float]) -> None:
        """Take other points; what was served stays what it was."""
        for served, old, new in zip(self.served, self.points, points, strict=True):
            served.extend([x + math.log(old / new) for x in served])
        self.levels = [median(served) if served else 0.0 for served in self.served]
        self.points = points
        self._sum()

    def forget(self, column: int) -> None:
        """Forget what was served of a point."""
        self.served[column].clear()
        self._sum()

    def estimates(self, elsewhere: float) -> list[float]:
        """Times of all points. Those that were not served lie between those that were."""
        shared = (self.total + _SHARED_WEIGHT * elsewhere) / (self.weight + _SHARED_WEIGHT)
        replayed = [point * math.exp(shared) for point in self.points]
        served = [point * math.exp(x) for point, x in zip(self.points, self.levels, strict=True)]
        counts = [len(column) for column in self.served]
        lows = [ms if n else 0.0 for ms, n in zip(served, counts, strict=True)]
        highs = [ms if n else math.inf for ms, n in zip(served, counts, strict=True)]
        lows = accumulate([0.0, *lows], max)
        highs = [*accumulate([math.inf, *reversed(highs)], min)][-2::-1]
        result = []
        for ms, own, n, low, high in zip(replayed, served, counts, lows, highs, strict=False):
            weight = _weight(n)
            result.append(own**weight * min(max(ms, low), high) ** (1 - weight))
        return result

    def _sum(self) -> None:
        weights = [_weight(len(column)) for column in self.served]
        self.weight = sum(weights)
        self.total = sum(w * level for w, level in zip(weights, self.levels, strict=True))


def _weight(num_served: int) -> float:
    """The weight of a point's served rounds against its prior, from 0 to 1."""
    return num_served / (num_served + (ROUND_SPREAD / REPLAY_SPREAD) ** 2)


def _clipped(x: float) -> float:
    return min(max(x, -_CLIP), _CLIP)


def _between(rows: Mapping[int, Sequence[float]], batch: int) -> list[float]:
    """The row of a batch size, from those around it."""
    return [_line({b: row[i] for b, row in rows.items()}, batch) for i in range(_width(rows))]


def _width(rows: Mapping[int, Sequence[float]]) -> int:
    return len(next(iter(rows.values())))


def _along_k(points: Column, k: int) -> float:
    if k in points:
        return points[k]
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


def _monotone(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """The rows as they rise to the right and downwards.

    An isotonic regression in one direction after the other keeps both orders.
    """
    risen = zip(*(_rising(column) for column in zip(*rows, strict=True)), strict=True)
    return [_rising(row) for row in risen]


def _rising(values: Sequence[float]) -> list[float]:
    """Isotonic regression: pool adjacent violators (Ayer et al. 1955)."""
    pools: list[tuple[float, int]] = []  # mean, count
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [mean for mean, count in pools for _ in range(count)]
