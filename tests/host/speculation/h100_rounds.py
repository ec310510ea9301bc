"""Rounds of different requests on a model of an H100, for tests of split rounds.

Tests and benchmarks/requests_simulated.py share this module. The model is Llama-3.1-8B in bfloat16
with an EAGLE-1 head. In a round, m requests have K drafts each, and the other n - m requests have
none. The time is composed of parts of `steady_loads.H100_MS`, which are measured or estimated:

    ms = T(rows) + 0.0117 max(n - 64, 0) + K d(m) + A (context + K context of the m / 32)

- T(rows): the time of the target for all rows. It is `H100_MS` without the time of drafts, and
  without the term for requests beyond 64 (256 requests of one row take longer than 64 of four).
- d(m): one pass of the drafter over m requests. 0.546 ms at 1 and 0.628 ms at 64 are measured.
  Above 64, it grows by 0.002 ms per request (estimate).
- A: the time to read a token of context. In a round, it is read once in 32 layers with 8 heads of
  128 keys and values. A draft reads it once in the head's only layer. These are 131,072 bytes at
  0.95 of 2,960 GB/s. Attention was measured at 0.87 to 1.03 of this rate, for 16 x 4,096 or more
  tokens.
- SPLIT_MS: the drafter observes the two parts of a split round one after the other (estimate).
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from specjax.host.speculation.acceptance import DraftOutcome
from specjax.host.speculation.contexts import context_bucket
from specjax.host.speculation.policy import Policy
from specjax.host.speculation.requests import ReadyRequests, RequestOutcomes
from specjax.host.speculation.rounds import DecodeLoad, Round, SplitShape
from specjax.host.speculation.step_cost import StepCost

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KS = tuple(range(6))
TARGET_MS = {
    1: 5.86, 64: 6.55, 128: 6.89, 256: 8.39, 384: 11.25, 512: 13.04, 1024: 23.65, 1536: 37.3,
}  # fmt: skip
TOKEN_MS = 131_072 / (0.95 * 2960e9) * 1e3
SPLIT_MS, NOISE = 0.15, 0.03


def round_ms(m: int, k: int, others: int = 0, context: float = 0, others_context: float = 0):
    """Return the milliseconds of a round: m requests have k drafts, `others` have none.

    Both numbers of requests include padding.
    """
    rows, n = m * (k + 1) + others, m + others
    target = np.interp(rows, [*TARGET_MS], [*TARGET_MS.values()])
    a_pass = 0.546 + (0.628 - 0.546) * min(m, 64) / 64 + 0.002 * max(m - 64, 0)
    attention = TOKEN_MS * (context + others_context + k * context / 32)
    split = SPLIT_MS if others else 0.0
    return float(target) + 0.0117 * max(n - 64, 0) + k * a_pass + attention + split


def replayed_cost(rng: np.random.Generator | None = None, error: float = 0.0) -> StepCost:
    """Return the times that an engine measures at its start, with a constant relative error.

    `error` is the standard deviation of the logarithm of each time.
    """
    factors = np.ones((len(BATCHES), len(KS)))
    if rng is not None:
        factors = np.exp(error * rng.standard_normal(factors.shape))
    points = {
        batch: {k: round_ms(batch, k) * float(factors[i, k]) for k in KS}
        for i, batch in enumerate(BATCHES)
    }
    costs = {"ms_per_context_token": TOKEN_MS, "ms_per_context_draft": TOKEN_MS / 32}
    return StepCost(points, batches=BATCHES, **costs)


EVERY = slice(None)


@dataclass(frozen=True)
class Served:
    """Rounds of some requests: the time of each round, and each request's tokens and drafts."""

    ms: np.ndarray  # [rounds]
    tokens: np.ndarray  # [rounds, n], expected
    drafts: np.ndarray  # [rounds, n]

    def speed(self, first: int = 0, who: slice = EVERY) -> float:
        """Return the tokens per millisecond of the requests `who`, from the round `first` on."""
        return float(self.tokens[first:, who].sum() / self.ms[first:].sum())


def serve(
    policy: Policy | int,
    rates: Sequence[float],
    contexts: Sequence[int],
    num_rounds: int,
    seed: int,
    *,
    may_split: bool = True,
    ready: Collection[SplitShape] | None = None,
) -> Served:
    """Run rounds of requests that never end or grow, with a conditional acceptance rate each.

    The policy observes a round after it has chosen the next one. If `policy` is a number, it is the
    K of all rounds.
    """
    rng, n = np.random.default_rng(seed), len(rates)
    lengths, rate = np.array(contexts), np.array(rates)[:, None]
    splits = all_splits() if ready is None else ready
    rows, late = [], None
    shapes = [(batch, k) for batch in BATCHES for k in KS]
    for _ in range(num_rounds):
        load_of = ReadyRequests(range(n), [None] * n, lengths.tolist(), [KS[-1]] * n)
        context = int(lengths.sum())
        if isinstance(policy, int):
            k, split = policy, None
        else:
            may = splits if may_split else None
            k = policy.choose(DecodeLoad(n, context, None, load_of, may, shapes))
            split = policy.split
            if late is not None:
                for outcome in late:
                    policy.observe(outcome)
        who = np.arange(n) if split is None else np.sort(np.array(split.drafting))
        rest = np.setdiff1d(np.arange(n), who)
        is_accepted = (rng.random((n, k)) < rate).cumprod(axis=1).sum(axis=1) if k else np.zeros(n)
        accepted = np.where(np.isin(np.arange(n), who), is_accepted, 0).astype(int)
        batch = next(b for b in BATCHES if b >= len(who))
        others = 0 if split is None else split.shape.others
        if split is not None:
            batch = split.shape.drafting
        own_context, rest_context = int(lengths[who].sum()), int(lengths[rest].sum())
        noise = max(0.1, 1 + NOISE * rng.standard_normal())
        if split is not None and split.shape not in splits:  # as two programs
            times = round_ms(batch, k, 0, own_context), round_ms(others, 0, 0, rest_context)
            late = [
                outcome_of(batch, k, who, accepted, lengths, times[0] * noise),
                outcome_of(others, 0, rest, accepted, lengths, times[1] * noise),
            ]
            ms = sum(times)
        else:
            ms = round_ms(batch, k, others, own_context, rest_context)
            one = outcome_of(batch, k, who, accepted, lengths, ms * noise)
            changes = {"others": others, "others_context": rest_context}
            late = [Round(**vars(one) | changes)]
        drafts = np.where(np.isin(np.arange(n), who), k, 0)
        expected = 1 + ((rate ** np.arange(1, k + 1)).sum(axis=1) if k else 0) * (drafts > 0)
        rows.append((ms, expected, drafts))
    ms, tokens, drafts = zip(*rows, strict=True)
    return Served(np.array(ms), np.array(tokens), np.array(drafts))


def outcome_of(batch, k, who, accepted, lengths, ms) -> Round:
    """Return the outcome of a round of the requests `who`, as a policy observes it."""
    counts = accepted[who].tolist()
    buckets = [context_bucket(length) for length in lengths[who]]
    verdicts = Counter(
        DraftOutcome(k, n, None, bucket) for n, bucket in zip(counts, buckets, strict=True)
    )
    requests = RequestOutcomes(who.tolist(), [k] * len(who), counts)
    return Round(batch, k, int(lengths[who].sum()), verdicts, ms, requests)


def all_splits() -> frozenset[SplitShape]:
    """Return every shape of a split round."""
    return frozenset(SplitShape(m, k, o) for m in BATCHES for k in KS[1:] for o in BATCHES)
