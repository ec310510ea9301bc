"""Limits how much drafts slow down the requests in any range of context lengths.

All requests of a round wait until the whole round has ended. If only requests with short contexts
gain from drafts, requests with long contexts wait for these drafts, and become slower than without
drafts. The ranges are the buckets of `contexts`. The mean speed of the requests in a range is

    speed(k) = (1 + their mean number of accepted drafts) / ms of the round

and a round is fair if speed(k) >= (1 - max_slowdown) * speed(0) in every range. Ranges with few
requests do not count: a single long request should not stop the drafts of all others.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.host.speculation.contexts import context_bucket, context_buckets
from specjax.host.speculation.rounds import DecodeLoad
from specjax.host.speculation.step_cost import StepCost

EVERY = slice(None)
MIN_SHARE = 1 / 8  # minimum fraction of the requests in a range that counts


class Fairness:
    """Compares the speed of requests with their speed without drafts, by context length.

    Attributes:
        doubt: relative standard deviation of the time of a round without drafts.
    """

    @classmethod
    def of(
        cls,
        load: DecodeLoad,
        goodput: Mapping[int, float],
        max_slowdown: float,
        cost: StepCost | None,
    ) -> "Fairness | None":
        """Return a `Fairness` for a round, or None if every K is allowed.

        Every K is allowed if the load does not describe each request, if `max_slowdown` is 1, or if
        K = 0 is not a choice. Every K is also allowed if all requests are in one range of context
        lengths: then a K with more tokens per millisecond than K = 0 slows down no request.

        Args:
            load: the load of the round.
            goodput: tokens per millisecond, over all requests, by K.
            max_slowdown: see the module's docstring.
            cost: the estimated times of rounds; None if they count as certain: `doubt` is 0.
        """
        if load.requests is None or 0 not in goodput or max_slowdown >= 1:
            return None
        lengths = load.requests.lengths
        if context_bucket(min(lengths)) == context_bucket(max(lengths)):
            return None
        buckets = context_buckets(lengths)
        counts = Counter(buckets)
        kinds = [kind for kind, count in counts.items() if count >= MIN_SHARE * len(buckets)]
        members = np.array(buckets)[:, None] == np.array(kinds)
        doubt = cost.spread(load.num_sequences, 0, load.num_context) if cost else 0.0
        return cls(members, goodput[0] * (1 - max_slowdown), doubt)

    def __init__(self, members: Any, least: float, doubt: float):
        """`members` bool[n, R] says in which of R ranges of context lengths each of n requests is.

        Ranges with few requests are left out. `least` is the minimum number of tokens per ms:
        (1 - max_slowdown) times the value for a round without drafts. For `doubt`, see the class.
        """
        self._means = members / members.sum(axis=0)
        self._least = least
        self.doubt = doubt

    def ks(self, goodput: Mapping[int, float], gains: Any, current: int | None) -> list[int]:
        """Return each K whose round slows down no range of context lengths too much.

        Rounds without drafts may be faster than estimated, by the fraction `doubt`. A new K
        (neither 0 nor `current`) is returned only if it would be allowed even then.

        Args:
            goodput: see `of`.
            gains: the expected number of accepted drafts of each of n requests by K, f64[n, K+1].
            current: the K of the last round, or None.
        """
        ks = list(goodput)
        sure = [goodput[k] / (1 if k in (0, current) else 1 + self.doubt) for k in ks]
        allowed = self.allows(sure, gains[:, ks])
        return [k for k, is_fair in zip(ks, allowed, strict=True) if is_fair]

    def allows(self, goodputs: Any, accepted: Any, order: Any = EVERY) -> Any:
        """Return bool[M]: whether each of M rounds slows down no range of lengths too much.

        Args:
            goodputs: the tokens per millisecond of each round, over all requests, f64[M].
            accepted: the expected number of accepted drafts of each of n requests, f64[n, M].
            order: indices of the requests in `accepted`, if they are not in the order of the load.
        """
        tokens = 1 + accepted.mean(axis=0)
        slowest = 1 + (self._means[order].T @ accepted).min(axis=0)
        return np.asarray(goodputs) * slowest / tokens >= self._least * (1 - 1e-9)
