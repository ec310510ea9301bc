"""Compares policies for K with each other and with an oracle, in a simulator without a device.

    python benchmarks/policies_simulated.py
    python benchmarks/policies_simulated.py --seeds 2 --requests 48

There are two kinds of simulations. In rollouts, 256 requests start together and end one after the
other. Step times come from three grids (tests/host/speculation/baselines.py). The acceptance stays
as profiled, falls or rises half-way, or is zero. For a seed, every policy has the same requests. In
the second kind, the load is constant, and step times come from these grids or from an H100
(steady_loads.py, next to baselines.py).
"""

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import numpy as np
from report import RESULTS, provenance, summary, write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "host" / "speculation"))

from baselines import (  # noqa: E402
    BATCHES,
    GRIDS,
    KS,
    MAKERS,
    SEED_RATES,
    SHIFTS,
    Scenario,
    run,
    shifted,
)
from steady_loads import H100_MS, LAWS, REPLAY_ERROR, SPIKES, serve  # noqa: E402

from specjax.bench.simulate import pool_regret  # noqa: E402
from specjax.host.speculation.methods import adaptive_policy  # noqa: E402
from specjax.host.speculation.policy import DecodeLoad, Policy, Round  # noqa: E402
from specjax.host.speculation.profile import Profile  # noqa: E402
from specjax.host.speculation.simulator import Outcome, Workload, simulate  # noqa: E402
from specjax.host.speculation.step_cost import StepCost  # noqa: E402

CHANGES = {"as profiled": 0.0, "-1 logit": -1.0, "+1 logit": 1.0, "nothing accepted": None}
POLICIES = [name for name in MAKERS if name != "oracle"]
LEARNING = ("adaptive", "profile, online", "thresholds")
STEADY_BATCHES, STEADY_LENGTH = (1, 16, 64, 256), 2000
COLD_ROUNDS, WINDOW, RECOVERED = 200, 50, 0.02
SERVED_ROUNDS, FROM_ROUND = 1500, 500


def main() -> None:
    """Run the simulations, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="default: results/policies_simulated.json")
    settings = parser.parse_args()
    source = provenance()
    is_default = (settings.seeds, settings.requests) == (8, 256)
    if settings.json is None and is_default:
        settings.json = RESULTS / "policies_simulated.json"
    context = multiprocessing.get_context("spawn")  # JAX has threads, which do not survive a fork
    with ProcessPoolExecutor(settings.processes, context) as pool:
        tables = compare(pool, settings.seeds, settings.requests)
        tables.append(follow(pool, settings.seeds))
        tables.append(against_static(pool, settings.seeds))
    for table in tables:
        print(table["title"])
        for row in [table["columns"], *table["rows"]]:
            print(*map(show, row), sep="\t")
    if settings.json is not None:
        result = {
            "title": "Choosing K, simulated",
            "description": f"Rollouts of {settings.requests} requests by policy: lengths lognormal "
            "(median 900), log-odds of acceptance spread by 0.8 between requests, 3 % of noise in "
            f"times; {settings.seeds} paired seeds. Regret is the part of the oracle's goodput "
            "that is lost, weighted by time; the oracle knows times and acceptance, and takes the "
            "best K of every round.",
            "provenance": source,
            "settings": {name: x for name, x in vars(settings).items() if name != "json"},
            "tables": tables,
        }
        write_result(settings.json, result)


def show(cell: Any) -> str:
    """Return a table's cell as text. Of a median with quartiles, only the median is shown."""
    value = cell[0] if isinstance(cell, list) else cell
    return f"{value:.3f}" if isinstance(value, float) else str(value)


# --- rollouts -------------------------------------------------------------------------------------


def compare(pool: ProcessPoolExecutor, seeds: int, num_requests: int) -> list[dict[str, Any]]:
    """Return tables with every policy's regret, regret at its worst batch size, and makespan."""
    cases = list(product(GRIDS, CHANGES.values(), ["oracle", *POLICIES]))
    jobs = [(*case, seed, num_requests) for case in cases for seed in range(seeds)]
    outcomes = list(pool.map(roll_out, *zip(*jobs, strict=True), chunksize=4))
    runs = {case: outcomes[i * seeds : (i + 1) * seeds] for i, case in enumerate(cases)}

    def makespans(case: tuple[str, float | None, str]) -> list[float]:
        oracle = runs[case[0], case[1], "oracle"]
        return [a.makespan_ms / b.makespan_ms for a, b in zip(runs[case], oracle, strict=True)]

    def worst(case: tuple[str, float | None, str]) -> str:
        by_batch = pool_regret(runs[case])
        batch = max(by_batch, key=by_batch.__getitem__)
        return f"{100 * by_batch[batch]:.1f} at {batch}"

    def table(title: str, cell: Callable[[Any], Any], note: str) -> dict[str, Any]:
        rows = [
            [grid, name, *(cell((grid, change, name)) for change in CHANGES.values())]
            for grid, name in product(GRIDS, POLICIES)
        ]
        return {
            "title": title,
            "columns": ["grid", "policy", *CHANGES],
            "rows": rows,
            "notes": [note],
        }

    return [
        table(
            "Regret, %",
            lambda case: summary([100 * outcome.regret for outcome in runs[case]]),
            "Grids: the seed's (Llama-3.1-8B with EAGLE on an H100, vLLM #32374); the same without "
            "the fixed cost of drafting; a model with experts, where more tokens read more experts "
            "until all are read. Tables and the online profile know the grid's times; the seed's "
            "table knows the seed's times. The adaptive policy starts from noisy replays, without "
            "rates. Thresholds are SGLang 0.5.23's.",
        ),
        table(
            "Regret of the worst batch size, %",
            worst,
            "Over all seeds, by the batch size that rounds are padded to.",
        ),
        table(
            "Makespan / the oracle's",
            lambda case: summary(makespans(case)),
            "Which requests come last is chance: about 2 % of noise between seeds.",
        ),
    ]


def roll_out(grid: str, change: float | None, name: str, seed: int, num_requests: int) -> Outcome:
    """Simulate one rollout; return its outcome without the trace."""
    return replace(run(Scenario(grid, change), name, seed, num_requests), trace=[])


# --- steady loads ---------------------------------------------------------------------------------


class Watched:
    """Wraps a policy, and counts the tokens of every round."""

    is_learning = True

    def __init__(self, policy: Policy):
        self.policy = policy
        self.choices = policy.choices
        self.num_tokens: list[int] = []

    def begin(self, replay: Callable[[], StepCost]) -> None:
        """See `Policy`."""
        self.policy.begin(replay)

    def choose(self, load: DecodeLoad) -> int:
        """See `Policy`."""
        return self.policy.choose(load)

    def observe(self, outcome: Round) -> None:
        """See `Policy`."""
        counts = outcome.verdicts.items()
        self.num_tokens.append(sum((v.num_accepted + 1) * count for v, count in counts))
        self.policy.observe(outcome)

    def learned(self) -> Profile | None:
        """See `Policy`."""
        return self.policy.learned()

    def target_changed(self) -> None:
        """See `Policy`."""
        self.policy.target_changed()

    def drafter_changed(self) -> None:
        """See `Policy`."""
        self.policy.drafter_changed()


def follow(pool: ProcessPoolExecutor, seeds: int) -> dict[str, Any]:
    """Return a table that shows how fast policies learn if the load is constant."""
    shifts = [shift for shift in SHIFTS if shift]
    cases = list(product(STEADY_BATCHES, shifts, LEARNING))
    jobs = [(*case, seed) for case in cases for seed in range(seeds)]
    found = list(pool.map(hold, *zip(*jobs, strict=True), chunksize=4))
    rows = []
    for i, (batch, shift, name) in enumerate(cases):
        cold, rounds = zip(*found[i * seeds : (i + 1) * seeds], strict=True)
        rows.append([batch, f"{shift:+.0f} logit", name, summary(cold), summary(rounds)])
    return {
        "title": "Cold starts and shifts",
        "columns": [
            "requests", "shift", "policy", f"regret of {COLD_ROUNDS} rounds, %",
            "rounds to recover",
        ],
        "rows": rows,
        "notes": [
            f"The seed's grid; all requests have {STEADY_LENGTH} tokens, so the load is constant. "
            "Regret of the first rounds, and number of rounds from the shift half-way to the first "
            f"of {WINDOW} rounds whose joint regret is at most {RECOVERED:.0%}; all remaining "
            "rounds if there are none."
        ],
    }  # fmt: skip


def hold(batch: int, shift: float, name: str, seed: int) -> tuple[float, float]:
    """Return the regret of the first rounds in percent, and the number of rounds to recover.

    These are the rounds from the shift of the acceptance until the regret is small again.
    """
    scenario = Scenario("seed", shift)
    policy = MAKERS[name](scenario)
    assert policy is not None
    watched = Watched(policy)
    workload = Workload([STEADY_LENGTH] * batch, [0.0] * batch, [0.0] * batch)
    outcome = simulate(scenario.world(), workload, watched, seed)
    came = np.array(list(accumulate(watched.num_tokens, initial=0)))
    at = int(np.searchsorted(came, batch * STEADY_LENGTH / 2))
    steady = [(i, k) for i, (_, n, k) in enumerate(outcome.trace) if n == batch]
    rates = (SEED_RATES, shifted(SEED_RATES, shift))
    cost, padded = scenario.cost(), min(b for b in BATCHES if b >= batch)
    ms = np.array([cost.ms(padded, k) for k in KS])
    losses = [loss_of(law, ms) for law in rates]
    lost = np.array([ms[k] * losses[i >= at][k] for i, k in steady])
    times = np.array([ms[k] for _, k in steady])
    cold = lost[:COLD_ROUNDS].sum() / times[:COLD_ROUNDS].sum()
    return 100 * float(cold), float(recovery(lost[at:], times[at:]))


def loss_of(rates: Sequence[float], ms: np.ndarray) -> np.ndarray:
    """Return, for each K, how much lower its goodput is than the best, as a fraction."""
    goodput = np.cumsum([1.0, *rates]) / ms
    return 1 - goodput / goodput.max()


def recovery(lost: np.ndarray, times: np.ndarray) -> int:
    """Return the number of rounds before the first window of rounds with little regret."""
    window = np.ones(min(WINDOW, len(lost)))
    regret = np.convolve(lost, window, "valid") / np.convolve(times, window, "valid")
    return int(np.argmax(regret <= RECOVERED)) if (regret <= RECOVERED).any() else len(lost)


# --- against static Ks on an H100's times ---------------------------------------------------------


def against_static(pool: ProcessPoolExecutor, seeds: int) -> dict[str, Any]:
    """Return a table of adaptive K's speed, divided by the speed of the best static K."""
    cases = list(product(LAWS, H100_MS))
    jobs = [(*case, seed) for case in cases for seed in range(seeds)]
    found = list(pool.map(hold_h100, *zip(*jobs, strict=True), chunksize=4))
    rows = []
    for i, (law, batch) in enumerate(cases):
        cold, steady, whole = zip(*found[i * seeds : (i + 1) * seeds], strict=True)
        rows.append([law, batch, summary(cold), min(cold), summary(steady), min(steady)])
        rows[-1].append(summary(whole))
    return {
        "title": "Adaptive K over the best static K, on times of an H100",
        "columns": [
            "acceptance", "requests", f"first {COLD_ROUNDS} rounds", "worst seed",
            f"rounds {FROM_ROUND} to {SERVED_ROUNDS}", "worst seed", "all rounds",
        ],
        "rows": rows,
        "notes": [
            "Tokens per millisecond without noise, of the K that is best in hindsight for these "
            "rounds. Times of Llama-3.1-8B with EAGLE-1, measured or estimated as "
            "tests/host/speculation/steady_loads.py says of each. Replays are wrong by "
            f"{REPLAY_ERROR:.0%} (standard deviation, for good); rounds have 3 % of noise, and "
            f"{SPIKES:.1%} of them take three times as long. Acceptance at positions 1, 2, ...: "
            "as measured .66 .36 .20 .10 .05; high .85 .72 .61 ...; low .35 .12 .04 ...; falling "
            "from .85 to .45 per draft; rising and falling between .4 and .8, twice."
        ],
    }  # fmt: skip


def hold_h100(law: str, batch: int, seed: int) -> tuple[float, float, float]:
    """Return adaptive K's tokens per millisecond, as ratios to the best static K.

    The ratios are for the first rounds, for later rounds, and for all rounds.
    """
    served = serve(adaptive_policy(max(KS)), batch, law, SERVED_ROUNDS, seed)
    parts = slice(COLD_ROUNDS), slice(FROM_ROUND, None), slice(None)
    cold, steady, whole = (float(served.of_best_static(batch, law, part)) for part in parts)
    return cold, steady, whole


if __name__ == "__main__":
    main()
