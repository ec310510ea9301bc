"""Estimates the acceptance rates of each request from its drafts so far."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.host.speculation.acceptance import conditional
from specjax.host.speculation.contexts import context_buckets

PRIOR_WEIGHT = 8.0  # the prior rate weighs as much as this number of the request's drafts
MEMORY_ROUNDS = 100.0  # a round's weight fades over about this number of the request's rounds
_ROOM = 64  # spare rows for requests, so that arrays seldom grow


class TextDrafts(NamedTuple):
    """The drafts that a request could get from texts in the next round.

    Attributes:
        num_drafts: number of drafts found, or 0.
        num_accepted: how many of these drafts are expected to be accepted, if they are used.
        chance: probability that these drafts are used instead of the drafter's drafts.
    """

    num_drafts: int
    num_accepted: float
    chance: float


class ReadyRequests(NamedTuple):
    """Describes the requests that are ready to decode. Each list has an item per request.

    Attributes:
        keys: values that identify the requests over several rounds.
        groups: see `Request.group`.
        lengths: number of tokens, including the prompt.
        limits: maximum number of the next round's drafts that can become part of the output. Both
            the request's limit on tokens and its limit on drafts bound this number.
        texts: drafts that the host found in texts; None instead of a list if the host has not
            searched for drafts.
    """

    keys: Sequence[Hashable]
    groups: Sequence[Hashable]
    lengths: Sequence[int]
    limits: Sequence[int]
    texts: Sequence[TextDrafts] | None = None


class RequestOutcomes(NamedTuple):
    """The outcome of a round for n of its requests. Each field has n items.

    Requests that had drafts from texts instead of the drafter's drafts are left out.

    Attributes:
        keys: values that identify the requests, as in `ReadyRequests`.
        num_drafts: number of usable drafts (see `DraftOutcome`).
        num_accepted: number of accepted drafts.
    """

    keys: Sequence[Hashable]
    num_drafts: Sequence[int]
    num_accepted: Sequence[int]


class RequestRates:
    """Counts accepted and verified drafts by request and position. Older drafts weigh less.

    A request's rate at a position is the weighted mean of two rates: the accepted fraction of its
    drafts, and a prior rate, which is the rate of similar requests. A new request has the prior
    rate.
    """

    def __init__(self, max_drafts: int):
        # What a round adds to a request's counts, by its numbers of drafts and of accepted drafts.
        some, positions = np.arange(max_drafts + 1), np.arange(max_drafts)
        num_verified = np.minimum(some + 1, some[:, None])
        ends = np.stack(np.broadcast_arrays(some, num_verified), axis=-1)
        self._added = (positions < ends[..., None]).astype(float)  # f64[K + 1, K + 1, 2, K]
        self._kept = 1 - (some[:, None, None] > 0) / MEMORY_ROUNDS  # of earlier counts
        self.reset()

    def reset(self) -> None:
        """Forget all requests."""
        self._rows: dict[Hashable, int] = {}
        self._last: tuple[list[Hashable], Any] = [], ()  # the last keys, and their rows
        # The numbers of accepted and of verified drafts, by row and position: f64[rows, 2, K].
        self._counts = np.zeros((0, *self._added.shape[2:]))

    def rates(
        self, requests: ReadyRequests, rates_of: Callable[[Hashable, int], Sequence[float]]
    ) -> np.ndarray:
        """Return the unconditional acceptance rates f64[n, K] of drafts 1..K of n requests.

        `rates_of(group, bucket)` returns the prior rates of the requests that belong to `group` and
        whose length is in the range `bucket` (see `contexts`).
        """
        pairs = list(zip(requests.groups, context_buckets(requests.lengths), strict=True))
        kinds = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
        ones = [1.0] * self._added.shape[-1]
        priors = PRIOR_WEIGHT * np.array([(conditional(rates_of(*kind)), ones) for kind in kinds])
        if len(kinds) > 1:
            priors = priors[[kinds[pair] for pair in pairs]]
        rows = self._find(requests.keys)
        counts = self._counts[rows] + priors
        return (counts[:, 0] / counts[:, 1]).cumprod(axis=1)

    @staticmethod
    def sums(
        rates: Any,
        limits: Sequence[int] | None = None,
        texts: Sequence[TextDrafts] | None = None,
    ) -> np.ndarray:
        """Return the expected number of accepted drafts for 0..K drafts, f64[n, K+1].

        `rates` f64[n, K] are the unconditional rates of the drafter's drafts. `limits` holds each
        request's maximum number of drafts; None means that requests have no limits. `texts` are the
        drafts from texts, which may be used instead of the drafter's drafts. All drafts from a text
        are assumed to have the same probability of acceptance.
        """
        rates = np.asarray(rates)
        n, k = rates.shape
        sums = np.zeros((n, k + 1))
        np.cumsum(rates, axis=1, out=sums[:, 1:])
        if texts is not None:
            num_drafts, accepted, chance = np.array(texts, float).T[..., None]
            found = accepted * np.minimum(np.arange(k + 1) / np.maximum(num_drafts, 1), 1)
            sums += chance * (found - sums)
        if limits is None or min(limits) >= k:
            return sums
        counts = np.minimum(np.arange(k + 1), np.array(limits)[:, None])
        return np.take_along_axis(sums, counts, axis=1)

    def observe(self, outcomes: RequestOutcomes) -> None:
        """Count the drafts of a round, and reduce the weight of earlier drafts."""
        rows = self._find(outcomes.keys)
        num_drafts, num_accepted = np.array(outcomes[1:], int)
        kept = self._kept[num_drafts] * self._counts[rows]
        self._counts[rows] = kept + self._added[num_drafts, num_accepted]

    def fade(self, keys: Sequence[Hashable], factor: float) -> None:
        """Multiply these requests' counts by `factor`, so that rates approach the prior rates."""
        rows = self._find(keys)
        self._counts[rows] *= factor

    def _find(self, keys: Sequence[Hashable]) -> Any:
        """Return the index of each request's row of counts. New requests get rows of zeros."""
        if self._last[0] != keys:  # usually the same requests ask again
            if any(key not in self._rows for key in keys):
                self._make_room(keys)
                for key in keys:
                    self._rows.setdefault(key, len(self._rows))
            self._last = list(keys), np.array([self._rows[key] for key in keys], int)
        return self._last[1]

    def _make_room(self, keys: Sequence[Hashable]) -> None:
        """Make room for the new requests among `keys`, if necessary.

        The arrays grow. If they would need more than 2 * (len(keys) + _ROOM) rows, all requests
        except `keys` are forgotten instead.
        """
        needed = len(self._rows) + len(keys)
        if needed <= len(self._counts):
            return
        if needed > 2 * (len(keys) + _ROOM):
            known = [key for key in dict.fromkeys(keys) if key in self._rows]
            kept = [self._rows[key] for key in known]
            self._rows = {key: row for row, key in enumerate(known)}
        else:
            kept = list(self._rows.values())
        room = 2 * (len(keys) + _ROOM) - len(kept)
        self._counts = np.pad(self._counts[kept], ((0, room), (0, 0), (0, 0)))
