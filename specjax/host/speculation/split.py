"""Splits rounds: the requests with the best acceptance rates draft, and the others do not.

In a round that is not split, all requests have the same number of rows. So if one request drafts,
all other requests run as many rows. A split round of n requests has two parts: m requests draft K
tokens each, and the other n - m requests run one row each. One program runs the target over all
rows at once. Until this program is compiled, the two parts may run one after the other.

    tokens = n + expected number of accepted drafts of the m requests
    ms     = time of m (K + 1) + (n - m) rows in the target, and of K drafts for m requests

The time is not known before a split round of this shape has run. The time is first estimated as the
time of an unsplit round with the same numbers of requests and of rows. In such a round, requests
have fewer drafts, so the drafter runs fewer times. The time of the missing runs is added. Later,
the times of served split rounds correct the estimate, separately for each shape.
"""

import math
from collections import defaultdict, deque
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from specjax.host.speculation.fairness import Fairness
from specjax.host.speculation.requests import RequestRates
from specjax.host.speculation.rounds import DecodeLoad, Round, Split, SplitShape, SplitWish
from specjax.host.speculation.step_cost import StepCost

EVERY = 16  # number of rounds that keep a choice
CHANGED = 0.2  # a choice is also made if the expected number of accepted drafts changes by this
MIN_GAIN = 0.02  # a split must improve goodput by this fraction
FADE = 0.97  # each choice multiplies the counts of requests that do not draft by this
MIN_SHARE = 1 / 16  # minimum fraction of the requests that draft
FIRST = 3  # after this number of rounds of a shape, choose again: one time may be an outlier
NUM_KEPT = 9  # the correction of a shape is the median over this number of its last rounds


class _Choice(NamedTuple):
    shape: SplitShape
    goodput: float


class Splitter:
    """Chooses which requests of a round draft, and learns the times of such split rounds.

    Attributes:
        split: which requests draft in the next round; None if the round is not split.
        wish: a split round whose program is worth compiling; None without such a round.
    """

    def __init__(self) -> None:
        self.split: Split | None = None
        self.wish: SplitWish | None = None
        # log(served time / estimate) of the last rounds, by shape. The first is often an outlier.
        self._errors: dict[SplitShape, deque[float]] = defaultdict(partial(deque, maxlen=NUM_KEPT))
        self._chosen: _Choice | None = None
        self._num_rounds = 0  # until the next choice
        self._accepted = 0.0  # at the last choice: expected for all requests, with the maximum K

    def clear(self) -> None:
        """Set `split` and `wish`, which describe the latest round, to None."""
        self.split = self.wish = None

    def choose(
        self,
        load: DecodeLoad,
        gains: Any,
        unsplit: float,
        cost: StepCost,
        rates: RequestRates,
        fairness: Fairness | None,
    ) -> Split | None:
        """Choose which requests draft in the next round; return None if the round is not split.

        The attribute `split` is set to the result. The attribute `wish` may be set, too.

        Args:
            load: the load of the round; its fields `requests` and `splits` are not None.
            gains: the expected number of accepted drafts, f64[n, K+1], if each of n requests makes
                0..K drafts.
            unsplit: tokens per millisecond of the best round that is not split.
            cost: the times of rounds that are not split.
            rates: the acceptance rates of requests. Counts of requests that do not draft are
                reduced from time to time, so that these requests are tried again later.
            fairness: tells which rounds are allowed; None if all are.
        """
        requests, chosen = load.requests, self._chosen
        assert requests is not None
        others = 0 if chosen is None else load.num_sequences - chosen.shape.drafting
        has_changed = chosen is not None and (
            others <= 0 or cost.padded(others) != chosen.shape.others
        )
        accepted = float(gains[:, -1].sum())
        if abs(accepted - self._accepted) > CHANGED * self._accepted:  # other texts were found
            has_changed = True
        self._num_rounds -= 1
        if is_due := self._num_rounds <= 0:
            self._num_rounds = EVERY
        if is_due or has_changed:
            self._accepted = accepted
            self._choose(load, gains, unsplit, cost, fairness)
        if (chosen := self._chosen) is None:
            return None
        order = _order(gains, chosen.shape.k).tolist()
        self.split = Split(chosen.shape, order[: chosen.shape.drafting])
        if is_due:
            rest = order[chosen.shape.drafting :]
            rates.fade([requests.keys[i] for i in rest], FADE)
        return self.split

    def observe(self, outcome: Round, cost: StepCost) -> None:
        """Learn the time of a split round that ran as one program.

        `cost` holds the times of rounds that are not split.
        """
        if outcome.ms is None:
            return
        shape = SplitShape(outcome.batch, outcome.k, outcome.others)
        context = cost.context_ms(shape.k, outcome.num_context)
        context += cost.context_ms(0, outcome.others_context)
        expected = split_ms(cost, shape) + context
        self._errors[shape].append(math.log(outcome.ms / expected))
        if len(self._errors[shape]) == FIRST:
            self._num_rounds = 0  # choose again, now that the time is known

    def _choose(
        self,
        load: DecodeLoad,
        gains: Any,
        unsplit: float,
        cost: StepCost,
        fairness: Fairness | None,
    ) -> None:
        """Choose the shape of split rounds, and set `wish`. For the arguments, see `choose`."""
        requests, splits = load.requests, load.splits
        assert requests is not None and splits is not None
        had, self._chosen = self._chosen, None
        least = unsplit * (1 if had else 1 + MIN_GAIN)
        n, table = load.num_sequences, np.array(cost.table)
        lengths = np.array(requests.lengths)
        plain_ms = cost.ms(n, 0, load.num_context)  # a lower bound of the time of a split
        found: list[_Choice] = []
        wished: list[_Choice] = []
        for k in filter(None, cost.ks):
            order = _order(gains, k)
            accepted, context = np.cumsum(gains[order, k]), np.cumsum(lengths[order])
            for m in cost.batches:
                if not MIN_SHARE * n <= m < n:
                    continue
                if load.max_tokens is not None and m * k + n > load.max_tokens:
                    continue
                shape = SplitShape(m, k, cost.padded(n - m))
                others_context = context[-1] - context[m - 1]
                added = cost.context_ms(k, context[m - 1]) + cost.context_ms(0, others_context)
                tokens = n + accepted[m - 1]
                whole, apart = (
                    _Choice(shape, float(tokens / max(time + added, plain_ms)))
                    for time in self._times(cost, table, shape)
                )
                if fairness is not None:
                    own = np.where(np.arange(n) < m, gains[order, k], 0.0)[:, None]
                    goodputs = np.array([whole.goodput, apart.goodput]) / (1 + fairness.doubt)
                    whole, apart = (
                        one if is_fair else one._replace(goodput=0.0)
                        for one, is_fair in zip(
                            (whole, apart), fairness.allows(goodputs, own, order), strict=True
                        )
                    )
                (found if shape in splits else wished).append(whole)
                # Until its time is known, one program counts as no slower than two programs.
                is_known = shape in splits and shape in self._errors
                if not is_known and (m, k) in load.shapes and (shape.others, 0) in load.shapes:
                    found.append(apart)
        best = max(found, key=lambda one: one.goodput, default=None)
        if best is not None and best.goodput > least:
            self._chosen = best
        reached = max(unsplit * (1 + MIN_GAIN), self._chosen.goodput if self._chosen else 0.0)
        best = max(wished, key=lambda one: one.goodput, default=None)
        if best is not None and best.goodput > reached:
            self.wish = SplitWish(best.shape, 1 - reached / best.goodput)

    def _times(self, cost: StepCost, table: Any, shape: SplitShape) -> tuple[float, float]:
        """Return a split round's milliseconds as one program and as two programs.

        The times are without context.
        """
        level = median(self._errors[shape]) if shape in self._errors else 0.0
        column = cost.ks.index(shape.k)
        apart = table[cost.batches.index(shape.drafting), column]
        apart += table[cost.batches.index(shape.others), cost.ks.index(0)]
        return split_ms(cost, shape, table) * math.exp(level), apart


def _order(gains: Any, k: int) -> Any:
    """Return the indices of requests. Requests that gain most from k drafts come first."""
    return np.argsort(-gains[:, k], kind="stable")


def split_ms(cost: StepCost, shape: SplitShape, table: Any = None) -> float:
    """Return the estimated milliseconds of a split round whose requests have no context tokens.

    One program runs the requests that draft and the requests that do not. `table` is `cost.table`
    as an array, or None to compute this array.
    """
    table = np.array(cost.table) if table is None else table
    num_requests = shape.drafting + shape.others
    mean_k = shape.drafting * shape.k / num_requests
    columns = [np.interp(num_requests, cost.batches, column) for column in table.T]
    ms = float(np.interp(mean_k, cost.ks, columns)) * max(1.0, num_requests / cost.batches[-1])
    return ms + (shape.k - mean_k) * _pass_ms(cost, shape.k, table)


def _pass_ms(cost: StepCost, k: int, table: Any) -> float:
    """Return the estimated milliseconds of one run of the drafter, without the rows of its drafts.

    One more draft adds a run of the drafter and a row for each request. So this time is linear in
    the number of requests, and the run is what remains for no requests.
    """
    few, many = ((row[cost.ks.index(k)] - row[cost.ks.index(0)]) / k for row in table[[0, -1]])
    least, most = cost.batches[0], cost.batches[-1]
    rows = least * (many - few) / (most - least) if most > least else 0.0
    return max(0.0, few - max(0.0, rows))
