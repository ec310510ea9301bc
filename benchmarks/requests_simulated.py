"""Compares adaptive K per request with one K for all requests, on a simulated H100.

    python benchmarks/requests_simulated.py

tests/host/speculation/h100_rounds.py models the time of a round (Llama-3.1-8B, EAGLE-1 head), and
says which of its numbers are measured. Requests never end. If a request has accepted the previous
drafts of a round, it accepts the next draft with a fixed probability. The policy starts with times
that are wrong by 8 %, and the rounds' times have 3 % of noise.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from report import RESULTS, provenance, write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from host.speculation.h100_rounds import (  # noqa: E402
    BATCHES,
    KS,
    TARGET_MS,
    replayed_cost,
    round_ms,
    serve,
)

from specjax.host.speculation.methods import adaptive_policy  # noqa: E402

REPLAY_ERROR, SHORT, LONG = 0.08, 1_000, 65_000
ROUNDS, ROUNDS_OF_MANY, FROM_ROUND = 1000, 400, 200
LAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "halves .9 and .1": lambda rng, n: np.repeat([0.9, 0.1], n // 2),
    "halves .8 and .4": lambda rng, n: np.repeat([0.8, 0.4], n // 2),
    "log-odds .6 +- .8": lambda rng, n: 1 / (1 + np.exp(-rng.normal(0.6, 0.8, n))),
    "log-odds .6 +- 1.5": lambda rng, n: 1 / (1 + np.exp(-rng.normal(0.6, 1.5, n))),
}


def main() -> None:
    """Run the simulations, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, help="default: %(default)s")
    settings = parser.parse_args()
    source = provenance()
    seeds = range(settings.seeds)
    tables = [by_acceptance(seeds), by_shape(seeds), by_context(seeds), against_off(seeds)]
    for table in tables:
        print(table["title"])
        for row in [table["columns"], *table["rows"]]:
            print(*(f"{x:.3f}" if isinstance(x, float) else x for x in row), sep="\t", flush=True)
    result = {
        "title": "Drafts per request, simulated",
        "description": "Steady loads of requests that differ, on a model of an H100 "
        "(tests/host/speculation/h100_rounds.py). Tokens per millisecond are expected values "
        "without noise; tries of other Ks and splits are included from the first round on, unless "
        "a column says otherwise.",
        "provenance": source,
        "settings": vars(settings),
        "tables": tables,
    }
    write_result(RESULTS / "requests_simulated.json", result)


def adaptive(seed: int, max_slowdown: float = 0.0) -> Any:
    """Return an adaptive policy whose initial times are wrong by `REPLAY_ERROR`."""
    cost = replayed_cost(np.random.default_rng([seed, 1]), REPLAY_ERROR)
    return adaptive_policy(KS[-1], cost, max_slowdown)


def num_rounds(n: int) -> int:
    """Return the number of rounds to simulate for n requests."""
    return ROUNDS_OF_MANY if n >= 256 else ROUNDS


def static_speeds(rates: Sequence[float], contexts: Sequence[int]) -> dict[int, float]:
    """Return tokens per millisecond of each static K."""
    return {k: serve(k, rates, contexts, 1, 0).speed() for k in KS}


def by_acceptance(seeds: Sequence[int]) -> dict[str, Any]:
    """Return a table of adaptive K's speed, divided by the speed of the best static K.

    It has adaptive K with and without split rounds. In a split round, some requests have K drafts,
    and the others none.
    """
    rows = []
    for law, n in product(LAWS, (16, 64, 128, 256)):
        found = []
        for seed in seeds:
            rates = LAWS[law](np.random.default_rng(seed), n).tolist()
            contexts = [SHORT] * n
            best = max(static_speeds(rates, contexts).values())
            ran = [
                serve(adaptive(seed), rates, contexts, num_rounds(n), seed, may_split=may_split)
                for may_split in (False, True)
            ]
            drafting = (ran[1].drafts[FROM_ROUND:] > 0).mean()
            speeds = [one.speed(first) / best for one in ran for first in (0, FROM_ROUND)]
            found.append([*speeds, drafting])
        rows.append([law, n, *np.mean(found, axis=0).tolist()])
    return {
        "title": "Adaptive K over the best static K",
        "columns": [
            "conditional acceptance", "requests", "one K for all", f"from round {FROM_ROUND}",
            "split", f"from round {FROM_ROUND}", "fraction that drafts",
        ],
        "rows": rows,
        "notes": [f"All requests have {SHORT} tokens of context. Means over seeds."],
    }  # fmt: skip


def by_shape(seeds: Sequence[int]) -> dict[str, Any]:
    """Return a table of the best goodput (tokens per time) if all acceptance rates are known.

    It compares split rounds, and any K per request, with one K for all requests.
    """
    rows = []
    for law, n in product(LAWS, (16, 64, 256)):
        found = []
        for seed in seeds:
            rates = np.sort(LAWS[law](np.random.default_rng(seed), n))[::-1]
            survival = rates[:, None] ** np.arange(1, KS[-1] + 1)
            gains = np.pad(survival.cumsum(axis=1), ((0, 0), (1, 0)))
            context = SHORT * n
            one_k = max((n + gains[:, k].sum()) / round_ms(n, k, 0, context) for k in KS)
            split = max(
                (n + gains[:m, k].sum())
                / round_ms(m, k, _padded(n - m), SHORT * m, SHORT * (n - m))
                for m in BATCHES
                if m < n
                for k in KS[1:]
            )
            found.append([max(split, one_k) / one_k, _best_ragged(survival, n) / one_k])
        rows.append([law, n, *np.mean(found, axis=0).tolist()])
    return {
        "title": "Best goodput with known rates, over the best single K",
        "columns": ["conditional acceptance", "requests", "split in two", "any K per request"],
        "rows": rows,
        "notes": [
            "Split in two: m requests draft K, and the others none. Any K per request: the rows "
            "with the highest chances of acceptance, whatever their number, without any padding "
            "and without a cost for ragged rows: an upper bound."
        ],
    }


def _padded(count: int) -> int:
    return next(batch for batch in BATCHES if batch >= count)


def _best_ragged(survival: np.ndarray, n: int) -> float:
    """Return an upper bound of the goodput if each request may have a different K."""
    chances = np.sort(survival.reshape(-1))[::-1]
    tokens = n + np.concatenate([[0], chances.cumsum()])
    best = 0.0
    for count in range(0, len(chances) + 1, max(1, n // 16)):
        least = chances[count - 1] if count else np.inf
        per_pass = (survival >= least).sum(axis=0)
        passes = sum(round_ms(int(m), 1) - round_ms(int(m), 0, 0) for m in per_pass if m)
        rows = sum(_target(2 * int(m)) - _target(int(m)) for m in per_pass if m)
        ms = round_ms(n, 0, 0, SHORT * n) - _target(n) + _target(n + count) + passes - rows
        best = max(best, float(tokens[count] / ms))
    return best


def _target(rows: int) -> float:
    return float(np.interp(rows, [*TARGET_MS], [*TARGET_MS.values()]))


def by_context(seeds: Sequence[int]) -> dict[str, Any]:
    """Return a table of batches in which half of the requests have a long context."""
    rows = []
    for n, low, limit in product((4, 16, 64), (0.02, 0.08, 0.3), (0.0, 0.05, 1.0)):
        half, found = n // 2, []
        rates, contexts = [0.7] * half + [low] * half, [SHORT] * half + [LONG] * half
        statics = static_speeds(rates, contexts)
        off = serve(0, rates, contexts, 1, 0)
        parts = slice(0, half), slice(half, n)
        for seed in seeds:
            ran = serve(adaptive(seed, limit), rates, contexts, ROUNDS, seed)
            drafts = [ran.drafts[FROM_ROUND:, part].mean() for part in parts]
            speeds = [ran.speed(0, part) / off.speed(0, part) for part in parts]
            total = ran.speed()
            found.append([total / off.speed(), total / max(statics.values()), *speeds, *drafts])
        rows.append([n, low, limit, *np.mean(found, axis=0).tolist()])
    return {
        "title": "Half of the requests with a long context",
        "columns": [
            "requests", "acceptance at 65k", "max_slowdown", "all / off", "all / best static K",
            "at 1k / off", "at 65k / off", "drafts at 1k", "drafts at 65k",
        ],
        "rows": rows,
        "notes": [
            "The other half has 1k tokens of context and acceptance .7. All requests share each "
            "round, so a request without drafts waits for the drafts of the others. `max_slowdown` "
            "limits how much slower this may make the requests of a range of context lengths."
        ],
    }  # fmt: skip


def against_off(seeds: Sequence[int]) -> dict[str, Any]:
    """Return a table of adaptive K's simulated tokens/s, relative to decoding without drafts."""
    contexts = (SHORT, 16_000, LONG)
    rows = []
    for n, rate in product((1, 4, 16, 64, 256), (0.001, 0.1, 0.3, 0.6, 0.9)):
        cells = []
        for context in contexts:
            off = n / round_ms(n, 0, 0, n * context)
            ran = [
                serve(adaptive(seed), [rate] * n, [context] * n, num_rounds(n), seed).speed()
                for seed in seeds
            ]
            cells.append(min(ran) / off)
        rows.append([n, rate, *cells])
    return {
        "title": "Adaptive K over no drafts, worst seed",
        "columns": ["requests", "acceptance", *(f"{c:,} tokens" for c in contexts)],
        "rows": rows,
        "notes": [
            f"Over all of {ROUNDS} rounds ({ROUNDS_OF_MANY} at 256 requests), tries included. All "
            "requests are alike. The drafter's work in rounds without drafts is not in the model."
        ],
    }


if __name__ == "__main__":
    main()
