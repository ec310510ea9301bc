"""Simulates a policy without a device, from a grid of step times and from acceptance rates.

Requests decode together in rounds, which are padded to the batch sizes that an engine compiles.
Each request has its own log-odds of acceptance, and rounds' times have noise. A policy that sees
each request may split rounds: only some requests then draft. The policy is compared to an oracle,
which knows the times and rates. The oracle takes the best K in every round, and never splits
rounds.
"""

import math
import random
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from operator import mul, truediv
from typing import Any

from specjax.host.speculation.acceptance import DraftOutcome, conditional, logit, sigmoid
from specjax.host.speculation.contexts import context_bucket
from specjax.host.speculation.policy import Policy
from specjax.host.speculation.requests import ReadyRequests, RequestOutcomes, TextDrafts
from specjax.host.speculation.rounds import DecodeLoad, Round, Split, SplitShape
from specjax.host.speculation.split import split_ms
from specjax.host.speculation.step_cost import StepCost

REPLAYS = 5


@dataclass(frozen=True)
class World:
    """The step times and acceptance rates of a simulation, which a policy has to learn.

    Attributes:
        cost: milliseconds of a round, without noise.
        rates: unconditional acceptance rates of a typical request, by position.
        batches: batch sizes to which rounds are padded. The last is the maximum.
        noise: relative standard deviation of the times of rounds.
        shift: a number that is added to all log-odds of acceptance once half of all tokens have
            been generated.
    """

    cost: StepCost
    rates: Sequence[float]
    batches: Sequence[int]
    noise: float = 0.03
    shift: float = 0.0

    def ms(self, batch: int, k: int) -> float:
        """Return the milliseconds, without noise, of a round of k drafts and batch size `batch`."""
        return self.cost.ms(batch, k)

    def round_ms(self, batch: int, k: int, context: float, split: Split | None) -> float:
        """Return the milliseconds, without noise, of a round with `context` context tokens.

        If `split` is not None, only some requests draft. The time without context is then the
        estimate of `split_ms`, and `batch` is not used. The context tokens add as much time as if
        all requests drafted.
        """
        ms = self.ms(batch, k) if split is None else split_ms(self.cost, split.shape)
        return ms + self.cost.context_ms(k, context)

    @property
    def splits(self) -> frozenset[SplitShape]:
        """Every shape that a split round may have."""
        ks = [k for k in self.cost.ks if k]
        return frozenset(SplitShape(*one) for one in product(self.batches, ks, self.batches))

    def padded(self, num_sequences: int) -> int:
        """Return the batch size to which `num_sequences` are padded."""
        return self.batches[bisect_left(self.batches, num_sequences)]

    def replay(self, ks: Sequence[int], rng: random.Random) -> StepCost:
        """Return the times that an engine measures as it starts.

        The time of each shape is the median of a few rounds with noise.
        """

        def median(batch: int, k: int) -> float:
            times = sorted(self.ms(batch, k) * self._factor(rng) for _ in range(REPLAYS))
            return times[REPLAYS // 2]

        points = {batch: {k: median(batch, k) for k in ks} for batch in self.batches}
        context: Any = {
            "ms_per_context_token": self.cost.ms_per_context_token,
            "ms_per_context_draft": self.cost.ms_per_context_draft,
        }
        return StepCost(points, batches=self.batches, **context)

    def _factor(self, rng: random.Random) -> float:
        return max(0.1, 1 + self.noise * rng.gauss(0, 1))


@dataclass(frozen=True)
class Workload:
    """Requests, in the order of their arrival.

    Attributes:
        lengths: number of tokens that each request decodes.
        arrivals: arrival time of each request, in milliseconds.
        effects: for each request, the difference between its log-odds of acceptance and the
            log-odds of a typical request.
        contexts: number of tokens of each request's prompt; () if all prompts are empty.
        texts: for each request, the acceptance rate of its drafts from texts, or 0 if it has no
            drafts from texts. A request with drafts from texts never uses the drafter's drafts.
            `texts` is () if no request has drafts from texts.
    """

    lengths: Sequence[int]
    arrivals: Sequence[float]
    effects: Sequence[float]
    contexts: Sequence[int] = ()
    texts: Sequence[float] = ()

    @classmethod
    def rollout(
        cls,
        rng: random.Random,
        num_requests: int = 256,
        *,
        median: float = 900,
        sigma: float = 0.9,
        longest: int = 12000,
        spread: float = 0.8,
    ) -> "Workload":
        """Draw requests that all arrive at once. Their lengths are lognormal, with a long tail."""
        lengths = [rng.lognormvariate(math.log(median), sigma) for _ in range(num_requests)]
        clipped = [int(min(max(length, 50), longest)) for length in lengths]
        effects = [rng.gauss(0, spread) for _ in range(num_requests)]
        return cls(clipped, [0.0] * num_requests, effects)

    @classmethod
    def stream(
        cls, rng: random.Random, num_requests: int, *, per_second: float, **others: float
    ) -> "Workload":
        """Draw requests that arrive at random (a Poisson process).

        On average, `per_second` requests arrive per second.
        """
        drawn = cls.rollout(rng, num_requests, **others)  # pyright: ignore[reportArgumentType]
        gaps = [1e3 * rng.expovariate(per_second) for _ in range(num_requests)]
        return cls(drawn.lengths, list(accumulate(gaps)), drawn.effects)


@dataclass
class Outcome:
    """The outcome of a simulated run.

    Goodput is the expected number of tokens per millisecond. For a split round, in which only some
    requests draft, goodput is the actual number of tokens, divided by the expected milliseconds. So
    the regret of a split round may be negative.

    Attributes:
        makespan_ms: time from the first arrival to the last token.
        regret: the mean over rounds, weighted by time, of 1 - goodput / the oracle's goodput.
        ms_by_batch: milliseconds spent in rounds, by padded batch size.
        lost_by_batch: the part of `ms_by_batch` that the oracle would have saved.
        request_k_histogram: for each number of drafts, how often a request had this number in a
            round.
        num_split: number of split rounds.
        trace: a tuple (start in milliseconds, number of sequences, K) for each round.
    """

    makespan_ms: float = 0.0
    num_tokens: int = 0
    ms_by_batch: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    lost_by_batch: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    k_histogram: Counter[int] = field(default_factory=Counter)
    request_k_histogram: Counter[int] = field(default_factory=Counter)
    num_split: int = 0
    trace: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def regret(self) -> float:
        """The lost fraction of the oracle's goodput, averaged over rounds, weighted by time."""
        return sum(self.lost_by_batch.values()) / sum(self.ms_by_batch.values())

    @property
    def regret_by_batch(self) -> dict[int, float]:
        """The lost fraction of the oracle's goodput, by padded batch size."""
        return {b: self.lost_by_batch[b] / ms for b, ms in sorted(self.ms_by_batch.items())}


class _Running:
    """The requests that decode, and their true acceptance rates, which the oracle knows."""

    def __init__(self, workload: Workload, logits: Sequence[float]):
        self.remaining = list(workload.lengths)
        self._contexts = workload.contexts or [0] * len(workload.lengths)
        self.texts = workload.texts or [0.0] * len(workload.lengths)
        self._ends = [a + b for a, b in zip(self._contexts, workload.lengths, strict=True)]
        self._effects = workload.effects
        self._logits = logits
        self._shift = 0.0
        self.active: list[int] = []
        self.rates: dict[int, list[float]] = {}  # conditional
        self.survival = [0.0] * len(logits)  # unconditional rates, summed over `active`

    def enter(self, request: int) -> None:
        self.active.append(request)
        rates = [sigmoid(x + self._effects[request] + self._shift) for x in self._logits]
        if self.texts[request]:
            rates = [self.texts[request]] * len(rates)
        self.rates[request] = rates
        self._sum(rates, 1)

    def length(self, request: int) -> int:
        """Return the number of tokens that a request has now, including the prompt."""
        return self._ends[request] - self.remaining[request]

    def load(self, max_k: int, splits: Collection[SplitShape]) -> DecodeLoad:
        """Return the load of a round of the active requests.

        `splits` are the shapes that the round may have if only some of the requests draft.
        """
        lengths = [self.length(request) for request in self.active]
        limits = [min(max_k, self.remaining[request] - 1) for request in self.active]
        groups = [None] * len(lengths)
        texts = None
        if any(self.texts):
            found = [
                self.rates[request][:max_k] if self.texts[request] else []
                for request in self.active
            ]
            texts = [TextDrafts(len(x), sum(accumulate(x, mul)), float(len(x) > 0)) for x in found]
        requests = ReadyRequests(list(self.active), groups, lengths, limits, texts)
        return DecodeLoad(len(lengths), sum(lengths), None, requests, splits)

    def leave(self, gone: Sequence[int]) -> None:
        for request in gone:
            self._sum(self.rates.pop(request), -1)
        self.active = [request for request in self.active if request in self.rates]

    def shift(self, by: float) -> None:
        """Add `by` to all log-odds of acceptance from now on."""
        self._shift += by
        again, self.active, self.rates = self.active, [], {}
        self.survival = [0.0] * len(self._logits)
        for request in again:
            self.enter(request)

    def _sum(self, rates: Sequence[float], sign: int) -> None:
        survival = accumulate(rates, mul)
        self.survival = [a + sign * b for a, b in zip(self.survival, survival, strict=True)]


def simulate(
    world: World,
    workload: Workload,
    policy: Policy | None,
    seed: int = 0,
    *,
    by_request: bool = False,
) -> Outcome:
    """Run the workload to its end with a policy, or with the oracle if `policy` is None.

    If `by_request` is true, the policy sees each request, and may split rounds. A policy observes a
    round only after it has chosen K for the next round, as in an engine with a step in flight.
    """
    rng = random.Random(seed)
    if policy is not None:
        choices = policy.choices
        policy.begin(lambda: world.replay(choices, rng))
    ks = range(len(world.rates) + 1)
    times = {batch: [world.ms(batch, k) for k in ks] for batch in world.batches}
    running = _Running(workload, [logit(rate) for rate in conditional(world.rates)])
    outcome, now, num_come = Outcome(), 0.0, 0
    num_requests, half = len(workload.lengths), sum(workload.lengths) / 2
    has_shifted = world.shift == 0
    late: Round | None = None
    splits = world.splits if by_request else frozenset()
    while running.active or num_come < num_requests:
        if not running.active:
            now = max(now, workload.arrivals[num_come])
        while (
            num_come < num_requests
            and workload.arrivals[num_come] <= now
            and len(running.active) < world.batches[-1]
        ):
            running.enter(num_come)
            num_come += 1
        if not has_shifted and outcome.num_tokens >= half:
            running.shift(world.shift)
            has_shifted = True
        num_sequences = len(running.active)
        batch = world.padded(num_sequences)
        tokens = list(accumulate(running.survival, initial=num_sequences))
        context, split, own_ms = 0, None, times[batch]
        if workload.contexts:
            context = sum(map(running.length, running.active))
            own_ms = [world.round_ms(batch, k, context, None) for k in ks]
        goodput = list(map(truediv, tokens, own_ms))
        best = max(goodput)
        if policy is None:
            k = goodput.index(best)
        else:
            load = DecodeLoad(num_sequences, context)
            k = policy.choose(running.load(policy.choices[-1], splits) if by_request else load)
            split = policy.split if by_request else None
            if late is not None:
                policy.observe(late)
        mean_ms = own_ms[k] if split is None else world.round_ms(batch, k, context, split)
        ms = mean_ms * world._factor(rng)
        drafting = None if split is None else {running.active[i] for i in split.drafting}
        num_before = outcome.num_tokens
        found = _verify(running, k, rng, outcome, drafting)
        verdicts = _count(found.values()) if by_request else _count(v[:2] for v in found.values())
        late = Round(batch, k, context, verdicts, ms)
        if by_request:
            num_drafts, num_accepted = ([seen[i] for seen in found.values()] for i in (0, 1))
            outcomes = RequestOutcomes(list(found), num_drafts, num_accepted)
            late = replace(late, requests=outcomes)
        if split is not None:
            late = replace(late, batch=split.shape.drafting, others=split.shape.others)
        lost = 1 - goodput[k] / best
        if split is not None:
            outcome.num_split += 1
            lost = 1 - (outcome.num_tokens - num_before) / mean_ms / best
        outcome.trace.append((now, num_sequences, k))
        outcome.k_histogram[k] += 1
        outcome.ms_by_batch[batch] += ms
        outcome.lost_by_batch[batch] += ms * lost
        now += ms
    outcome.makespan_ms = now - workload.arrivals[0]
    return outcome


def _verify(
    running: _Running,
    k: int,
    rng: random.Random,
    outcome: Outcome,
    drafting: Collection[int] | None,
) -> dict[int, tuple[Any, ...]]:
    """Draw the number of accepted drafts of every request, and append the tokens.

    `drafting` holds the requests that draft k tokens; None if all requests do. Return, by request,
    the fields of a `DraftOutcome`. Requests that do not draft, or draft from texts, are left out.
    """
    found, gone = {}, []
    remaining, random = running.remaining, rng.random
    for request in running.active:
        left = remaining[request]
        num_drafts = k if k < left else left - 1
        if drafting is not None and request not in drafting:
            num_drafts = 0
        num_accepted = 0
        for rate in running.rates[request][:num_drafts]:
            if random() >= rate:
                break
            num_accepted += 1
        if (drafting is None or request in drafting) and not running.texts[request]:
            found[request] = num_drafts, num_accepted, None, context_bucket(running.length(request))
        outcome.request_k_histogram[num_drafts] += 1
        outcome.num_tokens += num_accepted + 1
        remaining[request] = left = left - num_accepted - 1
        if not left:
            gone.append(request)
    if gone:
        running.leave(gone)
    return found


def _count(verdicts: Iterable[Sequence[Any]]) -> Counter[DraftOutcome]:
    return Counter({DraftOutcome(*seen): count for seen, count in Counter(verdicts).items()})
