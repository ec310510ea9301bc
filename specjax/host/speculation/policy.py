"""Chooses K, the number of drafts per request in a round.

K is chosen when the round is scheduled. A policy sees the load of a round and, a step or two later,
the outcome of the round (see `rounds`). Usually, all requests of a round draft K tokens. In a split
round, some requests draft K tokens, and the other requests draft none (see `split`).
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from specjax.host.speculation.acceptance import Acceptance
from specjax.host.speculation.fairness import Fairness
from specjax.host.speculation.profile import Profile
from specjax.host.speculation.requests import RequestRates
from specjax.host.speculation.rounds import DecodeLoad, Round, Split, SplitWish
from specjax.host.speculation.split import Splitter
from specjax.host.speculation.step_cost import StepCost

HYSTERESIS = 0.02  # the current K is replaced by a K whose goodput is better by this fraction
LONG_LED = 50  # it is also replaced if it was not the best for this number of rounds in a row
PROBE_BUDGET = 0.005  # fraction of the time that may be lost by trying Ks that look worse
PROBE_EVERY = 200  # maximum number of rounds between two tries
FIRST_PROBES, FIRST_EVERY = 3, 10  # number of tries of a new K, and of rounds between them
DOUBT = 2.0  # a K is tried if it could be best with a time this many standard deviations shorter
PARKED_FIRST, PARKED_LAST = 32, 512  # rounds at K = 0 between tries of drafting: first and maximum
PARKED_VERDICTS = 16  # number of outcomes (one per request and round) that a try should yield


class Policy(Protocol):
    """The interface of a policy, which chooses K, the number of drafts, for each step."""

    @property
    def choices(self) -> tuple[int, ...]:
        """Every K that `choose` may return."""
        ...

    @property
    def is_learning(self) -> bool:
        """Whether the policy learns from `observe`."""
        ...

    @property
    def weighs_requests(self) -> bool:
        """Whether `choose` reads the fields `num_context`, `requests` and `splits` of a load.

        If not, callers may leave these fields out.
        """
        ...

    def choose(self, load: DecodeLoad) -> int:
        """Return K for the next round. Called once per step, even if no sequence decodes."""
        ...

    @property
    def split(self) -> Split | None:
        """Which requests draft in the round whose K was just chosen; None if all draft K tokens."""
        ...

    @property
    def wish(self) -> SplitWish | None:
        """A split round, faster than the chosen round but not compiled yet; or None."""
        ...

    def begin(self, replay: Callable[[], StepCost]) -> None:
        """Prepare to serve an engine. `replay` is a function that measures the times of rounds."""
        ...

    def shape_ready(self, batch: int, k: int, time: Callable[[], float]) -> None:
        """Tell the policy that this shape is compiled. `time()` measures a round in ms."""
        ...

    def observe(self, outcome: Round) -> None:
        """Learn from the outcome of a round whose K was chosen a step or two ago."""
        ...

    def learned(self) -> Profile | None:
        """Return the current times and rates; None if times are not learned."""
        ...

    def target_changed(self) -> None:
        """Tell the policy that the target has new weights, so that acceptance may have changed."""
        ...

    def drafter_changed(self) -> None:
        """Tell the policy that the drafter has new weights, so that acceptance has changed."""
        ...


class PolicyRule:
    """The base class of policies that learn nothing."""

    is_learning = False
    weighs_requests = True
    split = wish = None  # rounds are not split

    def begin(self, replay: Callable[[], StepCost]) -> None:
        """Do nothing: there is nothing to prepare."""

    def shape_ready(self, batch: int, k: int, time: Callable[[], float]) -> None:
        """Do nothing: there is nothing to measure."""

    def observe(self, outcome: Round) -> None:
        """Do nothing: there is nothing to learn."""

    def learned(self) -> None:
        """Return None: this policy learns nothing."""

    def target_changed(self) -> None:
        """Do nothing: there is nothing to forget."""

    def drafter_changed(self) -> None:
        """Do nothing: there is nothing to forget."""


@dataclass(frozen=True)
class StaticPolicy(PolicyRule):
    """A policy that always chooses the same K."""

    weighs_requests = False
    k: int

    @property
    def choices(self) -> tuple[int, ...]:
        """The only K, as a tuple."""
        return (self.k,)

    def choose(self, load: DecodeLoad) -> int:
        """Return K, regardless of the load."""
        return self.k


@dataclass(frozen=True)
class TablePolicy(PolicyRule):
    """Chooses K from a table [[lo, hi, K], ...]: K drafts for lo to hi sequences.

    The table has the form of vLLM #32374. A number of sequences that is in no range has the K of
    the range before it.
    """

    weighs_requests = False
    table: tuple[tuple[int, int, int], ...]

    @property
    def choices(self) -> tuple[int, ...]:
        """Every K in the table."""
        return tuple(sorted({k for _, _, k in self.table}))

    def choose(self, load: DecodeLoad) -> int:
        """Return K of the last entry whose `lo` is at most the number of sequences."""
        return max(entry for entry in self.table if entry[0] <= max(load.num_sequences, 1))[2]


class GoodputPolicy:
    """Chooses the K with the highest estimated number of tokens per millisecond.

        goodput(k) = sum over requests of AL(min(k, its limit)) / ms(batch, k, context)

    AL is the mean acceptance length of a request (see `requests`). A request's limit is the maximum
    number of its drafts that can be used. The time of prefill chunks does not count, even in steps
    with chunks: prompts take the same time for every K.

    A policy that learns changes K only for a gain of `HYSTERESIS`, or for a smaller gain that
    lasts. From time to time, it tries a neighbour of the best K. While K = 0 is best, it sometimes
    tries a larger K, because rounds without drafts do not show acceptance. The time between such
    tries doubles until another K is best. Only some requests draft if that is faster (see `split`).
    Rounds that slow down one range of context lengths are avoided (see `fairness`).
    """

    weighs_requests = True

    def __init__(
        self,
        choices: Sequence[int],
        cost: StepCost | None,
        acceptance: Acceptance,
        *,
        learns_cost: bool = True,
        learns_acceptance: bool = True,
        warm_up_rounds: int = 0,
        max_slowdown: float = 0.0,
    ):
        """`cost` holds the times of rounds. If it is None, the engine measures them in `begin`.

        During the first `warm_up_rounds` rounds with drafts, K is chosen from the initial rates of
        `acceptance`, while new rates are learned. For `max_slowdown`, see `fairness`.
        """
        self._choices = tuple(sorted(choices))
        self._cost, self._is_replayed = cost, cost is None
        self.acceptance = acceptance
        self.requests = RequestRates(acceptance.max_drafts)
        self.splitter = Splitter()
        self._learns_cost, self._learns_acceptance = learns_cost, learns_acceptance
        self.is_learning = learns_cost or learns_acceptance
        self._warm_up_rounds = warm_up_rounds
        self._max_slowdown = max_slowdown
        self._first_rates = acceptance.rates()
        self._tried: Counter[tuple[int, int]] = Counter()  # number of rounds by padded batch, K
        self._k: int | None = None
        self._num_led = 0  # number of rounds in a row in which another K was better
        self._since_probe, self._parked, self._patience = 0, 0, PARKED_FIRST
        self._trial = 0  # remaining rounds of a try of a K above 0
        self._is_due = False  # whether a try is due, and may be paid for later
        self._credit = 0.0  # milliseconds that tries may cost

    @property
    def choices(self) -> tuple[int, ...]:
        """The Ks to choose from, in ascending order."""
        return self._choices

    @property
    def cost(self) -> StepCost:
        """The estimated times of rounds."""
        assert self._cost is not None, "an engine begins with the policy before it asks"
        return self._cost

    def begin(self, replay: Callable[[], StepCost]) -> None:
        """Measure the times of rounds, unless the policy was built with times."""
        if self._cost is None:
            self._cost = replay()

    def shape_ready(self, batch: int, k: int, time: Callable[[], float]) -> None:
        """Measure the time of this shape, unless the policy was built with times."""
        if self._is_replayed:
            self.cost.add(batch, k, time())

    def choose(self, load: DecodeLoad) -> int:
        """Return the K with the best goodput or, sometimes, another K in order to measure it."""
        self.splitter.clear()
        if not load.num_sequences:
            return self._choices[0]
        gains = self._gains(load)
        goodput = self._goodput(load, gains)
        learned = self.cost if self._learns_cost else None
        fairness = Fairness.of(load, goodput, self._max_slowdown, learned)
        fair = fairness.ks(goodput, gains, self._k) if fairness else self._choices
        best = max(fair, key=lambda k: (goodput[k], -k))
        if not self.is_learning:
            return best
        best = self._hold(best, goodput, fair)
        k = self._probe(best, goodput, load, is_limited=fairness is not None)
        if k != best or load.requests is None or load.splits is None or load.num_sequences < 2:
            return k
        split = self.splitter.choose(load, gains, goodput[best], self.cost, self.requests, fairness)
        return k if split is None else split.shape.k

    @property
    def split(self) -> Split | None:
        """See `Policy`."""
        return self.splitter.split

    @property
    def wish(self) -> SplitWish | None:
        """See `Policy`."""
        return self.splitter.wish

    def _hold(self, best: int, goodput: Mapping[int, float], fair: Collection[int]) -> int:
        """Return the K to use: `best` if it replaces the current K, and otherwise the current K.

        `best` replaces the current K if `best` is clearly better, if `best` was a little better in
        many rounds in a row, or if the current K is not in `fair` (not allowed).
        """
        k = best if self._k is None else self._k
        lead = goodput[best] / goodput[k] - 1
        self._num_led = self._num_led + 1 if lead > 0 else 0
        if k not in fair or lead >= HYSTERESIS or self._num_led >= LONG_LED:
            k, self._num_led = best, 0
        self._k = k
        return k

    def goodput(self, load: DecodeLoad) -> dict[int, float]:
        """Return the estimated number of tokens per millisecond, over all requests, by K."""
        return self._goodput(load, self._gains(load))

    def _gains(self, load: DecodeLoad) -> Any:
        """Return the expected number of accepted drafts for 0..max_drafts drafts, f64[n, K+1].

        There is a row per request; or one row, for a typical request, if requests are unknown.
        """
        if load.requests is None:
            return RequestRates.sums([self._rates(None, 0)])
        rates = self.requests.rates(load.requests, self._rates)
        return RequestRates.sums(rates, load.requests.limits, load.requests.texts)

    def _goodput(self, load: DecodeLoad, gains: Any) -> dict[int, float]:
        accepted = (gains.sum(axis=0) / len(gains)).tolist()
        n, result = load.num_sequences, {}
        times = self.cost.times(n, self._choices, load.num_context)
        for k, ms in zip(self._choices, times, strict=True):
            share = load.share(k)
            if share < 1:
                ms = self.cost.ms(max(1, round(n * share)), k, share * load.num_context)
            result[k] = share * n * (1 + accepted[k]) / ms
        return result

    def observe(self, outcome: Round) -> None:
        """Update the estimates of times and acceptance rates with a round's results."""
        if self._learns_acceptance and outcome.k:
            self._warm_up_rounds -= 1
            self.acceptance.observe(outcome.verdicts)
            if outcome.requests is not None and self._warm_up_rounds < 0:
                self.requests.observe(outcome.requests)
        if outcome.others:
            self.splitter.observe(outcome, self.cost)
            return
        self._tried[outcome.batch, outcome.k] += 1
        if outcome.ms is not None and self._learns_cost:
            self.cost.observe(outcome.batch, outcome.k, outcome.num_context, outcome.ms)

    def learned(self) -> Profile | None:
        """Return a profile with the learned rates and times; None if times are not learned.

        The times are estimates for rounds without context, for every batch size and K. The time
        that each context token adds is stored separately.
        """
        if not self._learns_cost:
            return None
        cost = self.cost
        step_ms = {b: {k: cost.ms(b, k) for k in self._choices} for b in cost.batches}
        return Profile(
            step_ms,
            tuple(self.acceptance.rates()),
            self._choices[-1],
            is_online=True,
            measured={
                "ms_per_context_token": cost.ms_per_context_token,
                "ms_per_context_draft": cost.ms_per_context_draft,
            },
        )

    def target_changed(self) -> None:
        """Give old counts of accepted drafts less weight. If K is 0, try drafting again soon."""
        if self._learns_acceptance:
            self.acceptance.discount()
            self._is_due, self._patience = True, PARKED_FIRST

    def drafter_changed(self) -> None:
        """Forget all counts of accepted drafts, and start again with the prior rates."""
        if self._learns_acceptance:
            self.acceptance.reset()
            self.requests.reset()

    def _rates(self, group: Hashable, bucket: int) -> list[float]:
        warm = self._warm_up_rounds <= 0
        return self.acceptance.rates(group, bucket) if warm else self._first_rates

    def _probe(
        self, best: int, goodput: Mapping[int, float], load: DecodeLoad, *, is_limited: bool
    ) -> int:
        n = load.num_sequences
        self._credit += PROBE_BUDGET * self.cost.ms(n, best)
        if best == 0:
            return self._try_drafting(goodput, load, is_limited=is_limited)
        self._parked, self._patience, self._trial = 0, PARKED_FIRST, 0
        self._since_probe += 1
        k = self._worth_a_try(best, goodput, load, is_limited=is_limited)
        loss = (1 - goodput[k] / goodput[best]) * self.cost.ms(n, k)
        if k == best or not self._can_afford(loss):
            return best
        self._since_probe = 0
        return k

    def _worth_a_try(
        self, best: int, goodput: Mapping[int, float], load: DecodeLoad, *, is_limited: bool
    ) -> int:
        """Return the K to try in the next round, or `best` if no try is due.

        A K is tried if its time is so uncertain that its goodput may be the best. K = 0 is tried a
        few times however slow it seems, because a round without drafts cannot take longer than one
        with drafts. If a limit on slowdown applies (`is_limited`), K = 0 is tried first. After
        `PROBE_EVERY` rounds without a try, the neighbour of `best` used in the fewest rounds is
        tried.
        """
        if self._since_probe < FIRST_EVERY:
            return best
        n = load.num_sequences
        batch = self.cost.padded(n)
        tried = {k: self._tried[batch, k] for k in self._choices if k != best}
        if self._learns_cost and tried:
            spread = partial(self.cost.spread, n, num_context=load.num_context)
            hopes = {k: goodput[k] * math.exp(DOUBT * spread(k)) for k in tried}
            k = max(hopes, key=hopes.__getitem__)
            is_new = tried.get(0, FIRST_PROBES) < FIRST_PROBES
            if is_new and (is_limited or hopes[k] <= goodput[best]):
                k, hopes[0] = 0, math.inf  # no other K may be slower than K = 0
            every = min(FIRST_EVERY * max(1, tried[k] // FIRST_PROBES), PROBE_EVERY)
            if hopes[k] > goodput[best] and self._since_probe >= every:
                return k
        if self._since_probe < PROBE_EVERY:
            return best
        at = self._choices.index(best)
        near = [k for k in self._choices[max(at - 1, 0) : at + 2] if k != best]
        return min(near, key=lambda k: tried[k], default=best)

    def _try_drafting(
        self, goodput: Mapping[int, float], load: DecodeLoad, *, is_limited: bool
    ) -> int:
        """Return 0 or, in some rounds, the best K above 0 in order to measure acceptance."""
        drafting = {k: goodput[k] for k in self._choices if k > 0}
        if not drafting or (load.requests is not None and not any(load.requests.limits)):
            return 0
        self._parked += not self._trial
        if not (self._trial or self._is_due or self._parked >= self._patience):
            return 0
        k = max(drafting, key=lambda k: drafting[k])
        if not self._trial:
            num_rounds = -(-PARKED_VERDICTS // load.num_sequences)
            ms, plain = (self.cost.ms(load.num_sequences, x, load.num_context) for x in (k, 0))
            loss = ms - plain if is_limited else (1 - goodput[k] / goodput[0]) * ms
            if self._is_due and self._credit > 0:
                self._credit -= num_rounds * loss
            elif self._parked < self._patience or not self._can_afford(num_rounds * loss):
                return 0
            self._is_due = False
            self._parked, self._patience = 0, min(2 * self._patience, PARKED_LAST)
            self._trial = num_rounds
            self.acceptance.discount()  # earlier counts are old
        self._trial -= 1
        return k

    def _can_afford(self, milliseconds: float) -> bool:
        """Return whether a try may cost `milliseconds`.

        If so, deduct them from the budget for tries.
        """
        if milliseconds > self._credit:
            return False
        self._credit -= max(milliseconds, 0.0)
        return True
