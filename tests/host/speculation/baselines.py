"""Simulated workloads with known times and rates, and simple policies to compare with.

Tests and benchmarks/policies_simulated.py share this module.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specjax.host.speculation.methods import adaptive_policy, profile_policy
from specjax.host.speculation.policy import (
    DecodeLoad,
    Policy,
    Round,
    StaticPolicy,
    TablePolicy,
)
from specjax.host.speculation.profile import Profile
from specjax.host.speculation.simulator import Outcome, Workload, World, simulate
from specjax.host.speculation.step_cost import Points, StepCost

MAX_DRAFTS = 5
KS = range(MAX_DRAFTS + 1)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# Llama-3.1-8B with an EAGLE drafter on an H100, as vLLM #32374 came with it: milliseconds of a step
# by batch size and K, and unconditional acceptance rates.
SEED_MS = {
    1: {0: 6.52059, 1: 7.36763, 3: 8.84066, 5: 10.32649},
    4: {0: 6.60152, 1: 7.47281, 3: 8.98117, 5: 10.40027},
    16: {0: 6.89882, 1: 7.85234, 3: 9.51828, 5: 11.19640},
    64: {0: 7.77409, 1: 9.65643, 3: 13.49788, 5: 16.83118},
    256: {0: 14.49142, 1: 27.13813, 3: 41.84843, 5: 57.40421},
}
SEED_RATES = (0.681180, 0.391435, 0.203524, 0.101404, 0.051418)
NO_RATES = (1e-6, 1e-9, 1e-12, 1e-15, 1e-18)  # a simulated rate has log-odds, so none is 0


def _untaxed_ms() -> Points:
    """Return `SEED_MS` without the fixed cost of drafting, as an additive fit estimates it."""
    return {
        batch: {k: ms - (0.02 + 0.0175 * batch if k else 0.0) for k, ms in row.items()}
        for batch, row in SEED_MS.items()
    }


def _moe_ms() -> Points:
    """Return times of a mixture that reads 8 of 128 experts for each token."""

    def ms(batch: int, k: int) -> float:
        num_tokens = batch * (k + 1)
        part_read = 1 - (1 - 8 / 128) ** num_tokens
        return 4 + 14 * part_read + 0.012 * num_tokens + 0.5 * k

    return {batch: {k: ms(batch, k) for k in KS} for batch in BATCHES}


GRIDS: Mapping[str, Points] = {"seed": SEED_MS, "untaxed": _untaxed_ms(), "moe": _moe_ms()}
SHIFTS = (0.0, -1.0, 1.0)


@dataclass(frozen=True)
class Scenario:
    """A grid of times, and the course of acceptance.

    Attributes:
        grid: a key of `GRIDS`.
        shift: added to all log-odds of acceptance after half of all tokens; None: no draft is ever
            accepted.
    """

    grid: str
    shift: float | None = 0.0

    def world(self) -> World:
        """Return the true times and rates."""
        rates = NO_RATES if self.shift is None else SEED_RATES
        return World(self.cost(), rates, BATCHES, shift=self.shift or 0.0)

    def cost(self) -> StepCost:
        """Return the times of padded rounds."""
        return StepCost(GRIDS[self.grid], ks=KS, batches=BATCHES)


class _Slot:
    """The Ks to choose from at some batch sizes, and the current one."""

    def __init__(self, ks: tuple[int, ...], down_margin: float):
        self.ks, self.down_margin = ks, down_margin
        self.at = len(ks) // 2
        self.mean = ks[self.at] - 1.0
        self.num_rounds = 0

    @property
    def k(self) -> int:
        return self.ks[self.at]

    def step(self) -> None:
        """Lower K while the mean is below the middle of two Ks; else raise K while it is above."""
        if self.k == 0:
            self.at = min(1, len(self.ks) - 1)
            if self.mean < 0:
                self.mean = self.k - 1.0
            return
        before = self.at
        while self.at > 0 and self.mean <= self._lower_bound() + self.down_margin:
            self.at -= 1
        if self.at == before:
            while self.at < len(self.ks) - 1 and self.mean > self.k - 0.5:
                self.at += 1

    def _lower_bound(self) -> float:
        return max(self.ks[self.at - 1], 1) - 0.5


class ThresholdPolicy:
    """A policy like SGLang's `--speculative-adaptive` (0.5.23): K by the mean of accepted drafts.

    Each batch size has SGLang's default list of Ks, up to `MAX_DRAFTS`. Times are not used.
    """

    SLOTS = {1: ((1, 3, 5), -0.25), 8: ((0, 1, 3), 0.0), 32: ((0, 1), 0.0), 64: ((0,), 0.0)}
    GAIN, WARM_UP, EVERY = 0.2, 10, 5

    is_learning = True
    choices = (0, 1, 3, 5)

    def __init__(self):
        self._slots = {batch: _Slot(*slot) for batch, slot in self.SLOTS.items()}

    def begin(self, replay: Callable[[], StepCost]) -> None:
        """Do nothing: times are not used."""

    def choose(self, load: DecodeLoad) -> int:
        """Return the current K for this batch size."""
        return self._slot(load.num_sequences).k

    def observe(self, outcome: Round) -> None:
        """Update the mean number of accepted drafts, and K after every few rounds."""
        num_sequences = sum(outcome.verdicts.values())
        slot = self._slot(num_sequences)
        if slot.k:
            accepted = sum(v.num_accepted * count for v, count in outcome.verdicts.items())
            slot.mean += self.GAIN * (accepted / num_sequences - slot.mean)
        slot.num_rounds += 1
        if slot.num_rounds > self.WARM_UP and (slot.num_rounds - self.WARM_UP) % self.EVERY == 0:
            slot.step()

    def learned(self) -> None:
        """Return None: no times are learned."""

    def _slot(self, num_sequences: int) -> _Slot:
        return self._slots[max(b for b in self._slots if b <= max(num_sequences, 1))]


def _profile(grid: str) -> Profile:
    return Profile(GRIDS[grid], SEED_RATES, MAX_DRAFTS, is_online=True)


def _table(grid: str) -> TablePolicy:
    return TablePolicy(_profile(grid).as_table())


MAKERS: Mapping[str, Callable[[Scenario], Policy | None]] = {
    "oracle": lambda scenario: None,
    "adaptive": lambda scenario: adaptive_policy(MAX_DRAFTS),
    "profile, online": lambda scenario: profile_policy(_profile(scenario.grid), BATCHES),
    "table": lambda scenario: _table(scenario.grid),
    "table of the seed": lambda scenario: _table("seed"),
    "thresholds": lambda scenario: ThresholdPolicy(),
    **{f"K = {k}": lambda scenario, k=k: StaticPolicy(k) for k in KS},
}


def run(scenario: Scenario, name: str, seed: int, num_requests: int = 256) -> Outcome:
    """Simulate a rollout with the policy `name`. Equal seeds give equal requests."""
    workload = Workload.rollout(random.Random(seed), num_requests)
    return simulate(scenario.world(), workload, MAKERS[name](scenario), seed + 1000)


def shifted(rates: tuple[float, ...], shift: float) -> list[float]:
    """Return the unconditional rates after `shift` is added to the log-odds at each position."""
    result, before, product = [], 1.0, 1.0
    for rate in rates:
        product *= 1 / (1 + math.exp(-shift) * (before / rate - 1))
        before = rate
        result.append(product)
    return result
