"""Estimates the milliseconds of a round, by batch size, K and context.

A round of B requests and K drafts runs B (K + 1) tokens through the target. The time of a round is
known at points (batch size, K), either from a profile or from measurements of the compiled steps.
Between points, the time is interpolated linearly. The estimated time never falls as requests or
drafts are added.

A served round is a round with users' requests. Its time is measured, and corrects the known times.
The logarithm of (served time / known time) is modelled as a sum of three terms:

- a term that all points of a batch size share, for example because of the host's time,
- a term of each point,
- noise.

The estimate is the posterior mean of this random-effects model. For a point that was served several
times, it follows the served times. For a point that was never served, it is the known time,
corrected by the shared term. Served rounds with long contexts are kept apart, by bucket of the mean
length of their requests (see `contexts`).
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from statistics import median

from specjax.host.speculation.contexts import context_bucket

REPLAY_SPREAD, ROUND_SPREAD = 0.06, 0.04  # standard deviations: of a point's term, of the noise
_NUM_KEPT = 31  # number of a point's last rounds whose median counts
_CLIP = 0.15  # log ratios are clipped to at most this size
_SURE = 3  # with this many rounds of a point, their median is no outlier, and is not clipped
_SETTLED, _DRIFT_GAIN = 5, 0.15  # rounds of a point before it updates the drift; that update's gain
_SHARED_WEIGHT = 0.25  # weight of the shared term's prior, in points
# The standard deviation of a point's estimate, by the number of its rounds.
_SPREADS = [(REPLAY_SPREAD**-2 + n * ROUND_SPREAD**-2) ** -0.5 for n in range(_NUM_KEPT + 1)]

Column = Mapping[int, float]  # milliseconds by K
Points = Mapping[int, Column]  # by batch size
_Place = tuple[int, int]  # (index of a batch size, bucket of lengths, see `contexts`)


class StepCost:
    """Estimates times of rounds (draft, then verify), and learns from observed times.

    All times may drift together, for example because of clock rates, other users or longer texts.
    So each observed time also corrects the times of batch sizes and Ks that have not run lately.
    """

    def __init__(
        self,
        points: Points,
        *,
        ks: Sequence[int] = (),
        batches: Sequence[int] = (),
        ms_per_context_token: float = 0.0,
        ms_per_context_draft: float = 0.0,
    ):
        """`points` are the known times. Times for further Ks in `ks` are computed from them.

        All times are in milliseconds. `batches` are the batch sizes to which rounds are padded.
        Without `batches`, rounds are not padded. The times in `points` are without context. Each
        token of context adds `ms_per_context_token` + K * `ms_per_context_draft` to a round of K
        drafts.
        """
        self._measured = {batch: dict(column) for batch, column in points.items()}
        self.ks = sorted({*ks, *(k for column in points.values() for k in column)})
        rows = {batch: [_along_k(points[batch], k) for k in self.ks] for batch in sorted(points)}
        self._is_padded = len(batches) > 0
        if batches:
            rows = {batch: _between(rows, batch) for batch in sorted(batches)}
        self.batches = list(rows)
        self._points = _monotone(list(rows.values()))
        self.ms_per_context_token = ms_per_context_token
        self.ms_per_context_draft = ms_per_context_draft
        self._drift = 0.0
        self._rows = [_Row(points) for points in _monotone(list(rows.values()))]
        self._long: dict[_Place, _Row] = {}  # for buckets after the first
        # Results of `_estimates` and, by batch size and bucket, of `_columns`, until times change.
        self._known: dict[_Place, tuple[Column, Column]] = {}
        self._found: dict[tuple[int, int], tuple[Column, Column]] = {}

    def widened(self, ks: Sequence[int], batches: Sequence[int]) -> "StepCost":
        """Return a `StepCost` with the measured times, for the given Ks and batch sizes.

        It does not contain what this object has learned from rounds with users' requests.
        """
        return StepCost(
            self._measured,
            ks=ks,
            batches=batches,
            ms_per_context_token=self.ms_per_context_token,
            ms_per_context_draft=self.ms_per_context_draft,
        )

    def add(self, batch_size: int, k: int, ms: float) -> None:
        """Set the measured time of a round without context.

        `batch_size` must be one of `batches`, and `k` one of `ks`. If other Ks were not measured
        for this batch size, their times are estimated: times are assumed to grow with K by the same
        factors as at the largest measured batch size.
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
        self._long.clear()
        self._forget()

    def ms(self, batch_size: int, k: int, num_context: float = 0) -> float:
        """Return the milliseconds of a round of k drafts.

        `num_context` is the number of context tokens, summed over requests. A batch size outside
        the known range has the times of the nearest known batch size. A K below all known Ks has
        the time of the smallest known K. Times for Ks above all known Ks are extrapolated.
        """
        return self.times(batch_size, (k,), num_context)[0]

    def times(self, batch_size: int, ks: Iterable[int], num_context: float = 0) -> list[float]:
        """Return the milliseconds of a round for each K in `ks`; see `ms`."""
        known = batch_size, context_bucket(num_context / batch_size)
        if known not in self._found:
            self._found[known] = self._columns(*known)
        points, estimates = self._found[known]
        drift, context_ms = math.exp(self._drift), self.context_ms
        return [
            _along_k(estimates, k) * (1 + context_ms(k, num_context) / _along_k(points, k)) * drift
            for k in ks
        ]

    def context_ms(self, k: int, num_context: float) -> float:
        """Return the milliseconds that `num_context` context tokens add to a round of k drafts."""
        return (self.ms_per_context_token + k * self.ms_per_context_draft) * num_context

    @property
    def table(self) -> list[list[float]]:
        """The milliseconds of rounds without context: a row per batch size, a column per K."""
        return [self.times(batch, self.ks) for batch in self.batches]

    def spread(self, batch_size: int, k: int, num_context: float = 0) -> float:
        """Return the standard deviation of the logarithm of an estimated time.

        `k` must be one of `ks`. For `num_context`, see `ms`.
        """
        place = self._index(batch_size), context_bucket(num_context / batch_size)
        return _SPREADS[len(self._row_at(place).served[self.ks.index(k)])]

    def padded(self, batch_size: int) -> int:
        """Return the size in `batches` to which `batch_size` is padded."""
        return self.batches[self._index(batch_size)]

    def observe(self, batch_size: int, k: int, num_context: float, ms: float) -> None:
        """Learn from the time of a round. `k` must be one of `ks`."""
        index, column = self._index(batch_size), self.ks.index(k)
        place = index, context_bucket(num_context / batch_size)
        row, (points, estimates) = self._row_at(place), self._estimates(place)
        expected = row.points[column] + self.context_ms(k, num_context)
        surprise = math.log(ms / expected) - self._drift
        if len(row.served[column]) >= _SETTLED:
            drift = _DRIFT_GAIN * _clipped(surprise - row.levels[column])
            self._drift += drift
            surprise -= drift
        now = math.log(estimates[k] / points[k])
        row.add(column, surprise, now)
        self._forget()

    def _forget(self) -> None:
        self._known.clear()
        self._found.clear()

    def _columns(self, batch_size: int, bucket: int) -> tuple[Column, Column]:
        """Return two maps from K to milliseconds, like `_estimates`, for any batch size.

        A batch size that is not in `batches` is padded, or the times are interpolated.
        """
        if self._is_padded:
            return self._estimates((self._index(batch_size), bucket))
        places = [(index, bucket) for index in range(len(self.batches))]
        known, estimates = zip(*map(self._estimates, places), strict=True)
        return self._between(known, batch_size), self._between(estimates, batch_size)

    def _estimates(self, place: "_Place") -> tuple[Column, Column]:
        """Return two maps from K to the milliseconds of a round: known times, and estimates.

        Neither map includes the drift, or the time that context tokens add. `place` is the index of
        a batch size, and a bucket of context lengths. The known times come from a profile or from
        artificial rounds. The estimates are computed from the known times and from the times of
        rounds with users' requests. If no round with users' requests has run in this bucket, the
        estimates of the first bucket are returned.
        """
        if place not in self._known:
            base = self._rows[place[0]]
            estimates = base.estimates(self._elsewhere(base))
            if (row := self._long.get(place)) is not None:
                estimates = row.near(estimates)
            both = base.points, estimates
            points, estimates = (dict(zip(self.ks, times, strict=True)) for times in both)
            self._known[place] = points, estimates
        return self._known[place]

    def _row_at(self, place: "_Place") -> "_Row":
        index, bucket = place
        if bucket and place not in self._long:
            self._long[place] = _Row(self._rows[index].points)
        return self._long[place] if bucket else self._rows[index]

    def _between(self, columns: Sequence[Column], batch_size: int) -> Column:
        rows = {b: list(column.values()) for b, column in zip(self.batches, columns, strict=True)}
        return dict(zip(self.ks, _between(rows, batch_size), strict=True))

    def _elsewhere(self, row: "_Row") -> float:
        """Return the prior mean of log(served time / known time) for the batch size of `row`.

        This is the mean over all other batch sizes, shrunk towards 0. For the times, see `_Row`.
        """
        others = [other for other in self._rows if other is not row]
        weight = sum(other.weight for other in others)
        return sum(other.total for other in others) / (weight + _SHARED_WEIGHT)

    def _index(self, batch_size: int) -> int:
        return min(bisect_left(self.batches, batch_size), len(self.batches) - 1)

    def _row(self, batch_size: int) -> "_Row":
        return self._rows[self._index(batch_size)]


class _Row:
    """For one batch size: the known time and the served times of each K.

    All times are in milliseconds, and without context. A known time comes from a profile or from
    artificial rounds. A served time is the time of a round with users' requests, and is stored as
    log(served time / known time).
    """

    def __init__(self, points: Sequence[float]):
        self.points = points
        self.served = [deque(maxlen=_NUM_KEPT) for _ in points]
        self.levels = [0.0 for _ in points]  # medians of `served`, see `add`
        self._ms = list(points)  # the times at these levels
        self._weights = [0.0 for _ in points]
        self.weight = self.total = 0.0  # sums over points, see `_weight`

    def add(self, column: int, surprise: float, expected: float) -> None:
        """Add the time of a served round, a round with users' requests.

        `column` is the index of the round's K. `surprise` is log(served time / known time), and
        `expected` is the current estimate of this logarithm. The first few rounds change the
        estimate only a little. For the two times, see the class.
        """
        served = self.served[column]
        served.append(surprise)
        level = median(served)
        if len(served) < _SURE:
            level = expected + _clipped(level - expected)
        self._set({column: level})

    def move(self, points: Sequence[float]) -> None:
        """Replace the known times by `points`.

        The times of rounds with users' requests do not change.
        """
        for served, old, new in zip(self.served, self.points, points, strict=True):
            moved = [x + math.log(old / new) for x in served]
            served.clear()
            served.extend(moved)
        self.points = points
        self._set({i: median(x) if x else 0.0 for i, x in enumerate(self.served)})

    def forget(self, column: int) -> None:
        """Forget the times of rounds with users' requests and one K, whose index is `column`."""
        self.served[column].clear()
        self._set({column: 0.0})

    def estimates(self, elsewhere: float) -> list[float]:
        """Return the estimated milliseconds of a round of each K, without context.

        A known time comes from a profile or from artificial rounds; a served time, from a round
        with users' requests. The estimate of a K without served times is limited to the range
        between the served times of smaller and of larger Ks. `elsewhere` is the mean of
        log(served time / known time) over other batch sizes, which is the prior mean for this one.
        """
        shared = (self.total + _SHARED_WEIGHT * elsewhere) / (self.weight + _SHARED_WEIGHT)
        factor = math.exp(shared)
        served = list(zip(self._ms, self._weights, strict=True))
        lows = accumulate([0.0, *[ms if weight else 0.0 for ms, weight in served]], max)
        highs = [ms if weight else math.inf for ms, weight in reversed(served)]
        highs = [*accumulate([math.inf, *highs], min)][-2::-1]
        bounds = zip(self.points, lows, highs, strict=False)
        return self.corrected([min(max(ms * factor, low), high) for ms, low, high in bounds])

    def corrected(self, prior: Sequence[float]) -> list[float]:
        """Return `prior`, the milliseconds of a round of each K, corrected by the served times.

        Served times are the times of rounds with users' requests. Each result is a weighted
        geometric mean of the prior time and the median of the served times. The more served times
        a K has, the larger their weight.
        """
        columns = zip(prior, self._ms, self._weights, strict=True)
        return [served**weight * ms ** (1 - weight) for ms, served, weight in columns]

    def near(self, prior: Sequence[float]) -> list[float]:
        """Return the milliseconds of each K, estimated from `prior` and from the served times.

        Served times are the times of rounds with users' requests. `prior` holds estimates that do
        not use this row's served times. First, all of `prior` is scaled by the mean ratio of the
        served times to `prior`. So the time of a K without served times changes, too.
        """
        known = zip(self._weights, self.levels, prior, self.points, strict=True)
        moves = (weight * (level - math.log(ms / own)) for weight, level, ms, own in known)
        shift = math.exp(sum(moves) / (self.weight + _SHARED_WEIGHT))
        return self.corrected([ms * shift for ms in prior])

    def _set(self, levels: Mapping[int, float]) -> None:
        for i, level in levels.items():
            self.levels[i] = level
            self._ms[i] = self.points[i] * math.exp(level)
            self._weights[i] = _weight(len(self.served[i]))
        self.weight, self.total = sum(self._weights), sum(map(mul, self._weights, self.levels))


def _weight(num_served: int) -> float:
    """Return the weight, from 0 to 1, that `num_served` measured times have against the prior."""
    return num_served / (num_served + (ROUND_SPREAD / REPLAY_SPREAD) ** 2)


def _clipped(x: float) -> float:
    return min(max(x, -_CLIP), _CLIP)


def _between(rows: Mapping[int, Sequence[float]], batch: int) -> list[float]:
    """Return the times of one batch size, interpolated between the batch sizes in `rows`."""
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
    """Interpolate linearly between `points`. Outside, return the value of the nearest point."""
    xs = sorted(points)
    if x <= xs[0]:
        return points[xs[0]]
    for a, b in pairwise(xs):
        if x <= b:
            return points[a] + (points[b] - points[a]) * (x - a) / (b - a)
    return points[xs[-1]]


def _monotone(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the rows, adjusted so that values never fall along a row or down a column.

    Each column, and then each row, is replaced by its isotonic regression. The second step leaves
    the columns non-decreasing.
    """
    risen = zip(*(_rising(column) for column in zip(*rows, strict=True)), strict=True)
    return [_rising(row) for row in risen]


def _rising(values: Sequence[float]) -> list[float]:
    """Return the isotonic regression of `values` (pool adjacent violators, Ayer et al. 1955)."""
    pools: list[tuple[float, int]] = []  # mean, count
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [mean for mean, count in pools for _ in range(count)]
