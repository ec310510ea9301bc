"""Estimates acceptance rates by position, from counts of accepted and rejected drafts.

A draft is verified only if all drafts before it were accepted. So the counts estimate conditional
rates c_i. The other figures follow from these rates, for i = 1..K and k = 0..K:

    c_i     = P(draft i accepted | drafts 1..i-1 accepted)
    rates_i = c_1 * ... * c_i
    AL(k)   = 1 + rates_1 + ... + rates_k

AL(k), the mean acceptance length, is the mean number of tokens that a request gains in a round of k
drafts. `rates` are unconditional, as in a profile (vLLM #32374) and in vLLM's metrics. Old counts
are gradually forgotten.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

# Counts are remembered for about `MEMORY_DRAFTS` drafts, and for at least `MEMORY_ROUNDS` rounds: a
# large batch gives many counts per round, but the next round continues the same texts.
MEMORY_DRAFTS, MEMORY_ROUNDS = 200, 20
MAX_GROUPS = 64
# The prior rate is optimistic. With few requests, the rate is learned slowly, but a useless draft
# costs little. With many requests, one round is enough to learn it.
_FIRST_RATE = 0.8
_PRIOR_WEIGHT, _POOL_WEIGHT = 4.0, 20.0  # in drafts
_OFFSET_WEIGHT = 20.0


class DraftOutcome(NamedTuple):
    """The outcome of a round for one request.

    Only usable drafts count. A draft is usable if it could become part of the output. Drafts after
    the first rejected draft are not verified (see `depth`).

    Attributes:
        num_drafts: number of usable drafts.
        num_accepted: number of accepted drafts.
        group: the request's group (see `Request.group`).
        bucket: the bucket of the request's number of tokens (see `contexts`).
    """

    num_drafts: int
    num_accepted: int
    group: Hashable = None
    bucket: int = 0

    @property
    def depth(self) -> int:
        """The number of verified drafts: the accepted drafts and the first rejected draft."""
        return min(self.num_accepted + 1, self.num_drafts)


class _Counts:
    """Counts of accepted and rejected drafts by position. Older drafts weigh less."""

    def __init__(self, max_drafts: int):
        self.accepted = [0.0] * max_drafts
        self.rejected = [0.0] * max_drafts

    def forget(self, factor: float) -> None:
        self.accepted = [factor * x for x in self.accepted]
        self.rejected = [factor * x for x in self.rejected]

    def learn(self, verdicts: Sequence[tuple[DraftOutcome, int]]) -> None:
        # Only first drafts count here: the others depend on them.
        num_drafts = sum([count for _, count in verdicts])
        self.forget(1 - min(num_drafts / MEMORY_DRAFTS, 1 / MEMORY_ROUNDS))
        for (num_drafts, num_accepted, *_), count in verdicts:
            for i in range(num_accepted):
                self.accepted[i] += count
            if num_accepted < num_drafts:
                self.rejected[num_accepted] += count

    def mean(self, i: int, prior: float, weight: float) -> float:
        """Return the estimated conditional acceptance rate at position i, counted from 0.

        This is the weighted mean of the observed rate and of `prior`, which counts like `weight`
        drafts.
        """
        total = self.accepted[i] + self.rejected[i] + weight
        return (self.accepted[i] + weight * prior) / total


class Acceptance:
    """Learns from outcomes of rounds how often the first, the second, ... draft is accepted.

    There is a conditional rate for each draft position: for all requests together, for each bucket
    of lengths (see `contexts`), and for each group of requests in a bucket. Each rate starts at a
    prior rate, and approaches the observed fraction as drafts are counted. The prior rates are

    - for a group: the bucket's rate at the same position,
    - for a bucket: the rate of the next shorter bucket, or, for the shortest one, of all requests,
    - for all requests: the rate at the position before, with a learned offset added to its
      log-odds.

    The offset changes little when acceptance rises or falls as a whole. So the rates of later
    positions stay useful, even if these positions are seldom drafted. While all requests are in one
    bucket, the bucket has no separate rates.
    """

    def __init__(self, max_drafts: int, prior: Sequence[float] = ()):
        """`prior` holds measured unconditional acceptance rates by position, or is empty."""
        self.max_drafts = max_drafts
        self._prior = tuple(prior)
        self.reset()

    def reset(self) -> None:
        """Forget all counts and learned offsets, for example after a change of the drafter.

        The rates start again from the `prior` of the constructor, or from a default without one.
        """
        max_drafts = self.max_drafts
        logits = [logit(rate) for rate in conditional(self._prior)[:max_drafts]]
        self._first = sigmoid(logits[0]) if logits else _FIRST_RATE
        known = [b - a for a, b in zip(logits, logits[1:], strict=False)]
        self._offsets = [0.0, *known, *[0.0] * max_drafts][:max_drafts]
        self._all = _Counts(max_drafts)
        self._groups: dict[Hashable, _Counts] = {}  # by (group, bucket)
        self._buckets: dict[int, _Counts] = {}
        self._found: dict[Hashable, list[float]] = {}  # results of `rates`, until counts change

    def rates(self, group: Hashable = None, bucket: int = 0) -> list[float]:
        """Return the unconditional rates of drafts 1..max_drafts for a group's requests.

        `bucket` is the number of the range (see `contexts`) that contains the requests' lengths. If
        `group` has no counts in this bucket, the rates of the bucket are returned.
        """
        if (group, bucket) in self._found:
            return self._found[group, bucket]
        rates, known = self._pooled(), []
        if len(self._buckets) > 1:
            known = [self._buckets[b] for b in sorted(self._buckets) if b <= bucket]
        if (counts := self._groups.get((group, bucket))) is not None:
            known.append(counts)
        for counts in known:
            rates = [counts.mean(i, prior, _POOL_WEIGHT) for i, prior in enumerate(rates)]
        self._found[group, bucket] = list(accumulate(rates, mul))
        return self._found[group, bucket]

    def observe(self, verdicts: Mapping[DraftOutcome, int]) -> None:
        """Count the outcomes of a round. `verdicts` maps each outcome to its number of requests."""
        seen: dict[_Counts, list[tuple[DraftOutcome, int]]] = {}
        for verdict, count in verdicts.items():
            if not verdict.num_drafts:
                continue
            group, bucket = (verdict.group, verdict.bucket), verdict.bucket
            counts = self._groups.pop(group, None) or _Counts(self.max_drafts)
            self._groups[group] = counts  # the last group to be evicted
            if bucket not in self._buckets:
                self._buckets[bucket] = _Counts(self.max_drafts)
            for one in self._all, self._buckets[bucket], counts:
                seen.setdefault(one, []).append((verdict, count))
        if not seen:
            return
        self._found.clear()
        for counts, pairs in seen.items():
            counts.learn(pairs)
        while len(self._groups) > MAX_GROUPS:
            del self._groups[next(iter(self._groups))]
        self._learn_offsets(verdicts)

    def discount(self, factor: float = 0.25) -> None:
        """Multiply the weight of old counts by `factor`, for example after a change of weights.

        This hardly changes the rates over all requests, but lets new counts change them faster.
        """
        self._found.clear()
        self._first = self._pooled()[0] if self.max_drafts else self._first
        for counts in (self._all, *self._buckets.values(), *self._groups.values()):
            counts.forget(factor)

    def _pooled(self) -> list[float]:
        rates: list[float] = []
        for i, offset in enumerate(self._offsets):
            prior = sigmoid(logit(rates[-1]) + offset) if rates else self._first
            rates.append(self._all.mean(i, prior, _PRIOR_WEIGHT))
        return rates

    def _learn_offsets(self, verdicts: Mapping[DraftOutcome, int]) -> None:
        """Update the offset of each draft position.

        The offset estimates the difference between the log-odds of acceptance at this position and
        at the position before. It moves towards the current difference. The more drafts were just
        verified at this position, the further it moves.
        """
        logits = list(map(logit, self._pooled()))
        depths = [(verdict.depth, count) for verdict, count in verdicts.items()]
        for i in range(1, self.max_drafts):
            fresh = sum([count for depth, count in depths if depth > i])
            gain = fresh / (fresh + _OFFSET_WEIGHT)
            difference = logits[i] - logits[i - 1]
            self._offsets[i] += gain * (difference - self._offsets[i])


def expected_tokens(rates: Sequence[float], k: int) -> float:
    """Return AL(k), the mean number of tokens that a request gains in a round of k drafts.

    The target's own token counts, too. `rates` are the unconditional acceptance rates.
    """
    return 1 + sum(rates[:k])


def conditional(rates: Sequence[float]) -> list[float]:
    """Return the conditional acceptance rates c_i, given the unconditional `rates`."""
    return [b / a if a else 0.0 for a, b in zip([1.0, *rates], rates, strict=False)]


def logit(p: float) -> float:
    """Return the log-odds of a probability. Probabilities near 0 and 1 are clipped first."""
    p = min(max(p, 1e-4), 1 - 1e-4)
    return math.log(p / (1 - p))


def sigmoid(x: float) -> float:
    """Return the probability with log-odds x."""
    return 1 / (1 + math.exp(-x))
