"""Constant loads with times measured on a GPU, to compare adaptive K with constant Ks.

Tests and benchmarks/policies_simulated.py share this module. Times are milliseconds of a round of
Llama-3.1-8B in bfloat16 with an EAGLE-1 drafter on an H100 (jax 0.11.2, commit 04df7ee). Batch
sizes 1, 64 and 256 at K = 0, 1, 3 and 5 were measured in served steps. K = 2 at batch size 64 was
also measured, relative to K = 1 and 3. Batch sizes 4 and 16 up to K = 3 follow from tokens per
second with constant K, including prompts. All other times are estimates. Most are linear in K. At
batch sizes 4 and 16 beyond K = 3, they are the time of a draft at batch size 1 plus the time of the
target's rows at 64.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specjax.host.speculation.acceptance import DraftOutcome
from specjax.host.speculation.policy import DecodeLoad, Policy, Round
from specjax.host.speculation.step_cost import Points, StepCost

H100_MS: dict[int, dict[int, float]] = {
    1: {0: 5.856, 1: 6.403, 2: 6.948, 3: 7.493, 4: 8.041, 5: 8.589},
    4: {0: 6.04, 1: 6.78, 2: 7.33, 3: 8.65, 4: 9.20, 5: 9.75},
    16: {0: 6.28, 1: 7.27, 2: 8.01, 3: 8.93, 4: 9.58, 5: 10.23},
    64: {0: 6.548, 1: 7.522, 2: 8.954, 3: 10.270, 4: 12.329, 5: 14.387},
    256: {0: 10.628, 1: 16.283, 2: 22.587, 3: 28.891, 4: 36.706, 5: 44.520},
}
KS = tuple(H100_MS[1])
NOISE, SPIKES, SPIKE = 0.03, 0.005, 3.0  # of a time: lognormal, and now and then three times it
REPLAY_ERROR, REPLAY_OVERHEAD_MS = 0.08, 0.3  # by which replays differ from serving for good
REPLAYS = 5

# Unconditional rates of drafts 1, 2, ... by the part of the run that is over.
LAWS: Mapping[str, Callable[[float], Sequence[float]]] = {
    "as measured": lambda part: (0.66, 0.36, 0.20, 0.10, 0.05),
    "high": lambda part: tuple(0.85 ** (i + 1) for i in range(5)),
    "low": lambda part: tuple(0.35 ** (i + 1) for i in range(5)),
    "falling": lambda part: tuple((0.85 - 0.4 * part) ** (i + 1) for i in range(5)),
    "rising and falling": lambda part: tuple(
        (0.6 - 0.2 * math.cos(4 * math.pi * part)) ** (i + 1) for i in range(5)
    ),
}


@dataclass(frozen=True)
class Served:
    """Rounds of a policy: the K of each round, and its time and tokens without noise."""

    ks: np.ndarray
    ms: np.ndarray
    tokens: np.ndarray  # of a request

    def of_best_static(self, batch: int, law: str, rounds: slice) -> float:
        """Return the speed in these rounds, divided by the speed of the best constant K."""
        rates = [LAWS[law](i / len(self.ks)) for i in range(len(self.ks))]
        tokens = np.cumsum([[1.0, *row] for row in rates], axis=1)[rounds].mean(axis=0)
        static = tokens / np.array([H100_MS[batch][k] for k in KS])
        return self.tokens[rounds].sum() / self.ms[rounds].sum() / static.max()


def serve(
    policy: Policy,
    batch: int,
    law: str,
    num_rounds: int,
    seed: int,
    wrong_ms: Mapping[int, float] | None = None,
) -> Served:
    """Run rounds of `batch` requests that never end.

    The policy observes a round after it has chosen the next one. `wrong_ms` replaces some of the
    times that replays of this batch size measure.
    """
    rng, times = np.random.default_rng(seed), H100_MS[batch]
    replayed = H100_MS | {batch: times | (wrong_ms or {})}
    policy.begin(lambda: _replay(rng, replayed, policy.choices))
    ks, tokens, late = [], [], None
    for i in range(num_rounds):
        k = policy.choose(DecodeLoad(batch))
        if late is not None:
            policy.observe(late)
        rates = LAWS[law](i / num_rounds)
        ms = times[k] * _factor(rng)
        late = Round(batch, k, 0, draw_verdicts(rng, rates, k, batch), ms)
        ks.append(k)
        tokens.append(1 + sum(rates[:k]))
    return Served(np.array(ks), np.array([times[k] for k in ks]), np.array(tokens))


def _replay(rng: np.random.Generator, rows: Points, ks: Sequence[int]) -> StepCost:
    points = {}
    for batch, row in rows.items():
        wrong = np.exp(REPLAY_ERROR * rng.standard_normal(len(ks)))
        points[batch] = {
            k: (row[k] + REPLAY_OVERHEAD_MS)
            * float(error * np.median([_factor(rng) for _ in range(REPLAYS)]))
            for k, error in zip(ks, wrong, strict=True)
        }
    return StepCost(points, batches=tuple(H100_MS))


def _factor(rng: np.random.Generator) -> float:
    spike = SPIKE if rng.random() < SPIKES else 1.0
    return spike * math.exp(NOISE * rng.standard_normal())


def draw_verdicts(
    rng: np.random.Generator, rates: Sequence[float], k: int, batch: int
) -> Counter[DraftOutcome]:
    """Draw the outcomes of k drafts for each request, given the unconditional rates."""
    verdicts, left, before = Counter(), batch, 1.0
    for i, rate in enumerate(rates[:k]):
        stood = int(rng.binomial(left, rate / before)) if left else 0
        verdicts[DraftOutcome(k, i)] = left - stood
        left, before = stood, rate
    verdicts[DraftOutcome(k, k)] += left
    return +verdicts
