"""Compares dynamic K with static K and no speculation on a demo model, and times changes of K.

    python benchmarks/dynamic_k_cpu.py
    python benchmarks/dynamic_k_cpu.py --only switch

All alternatives run in turn in one process, in rounds, so that other load on the machine affects
all of them equally. Adaptive K starts every run with the times that the engine measured at
start-up, and without any knowledge of acceptance.
"""

import argparse
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from report import FOLDER, RESULTS, provenance, summary, write_result

from specjax.bench.engines import Engines, Setup, open_engines, warm_up
from specjax.bench.plot import plot_sweep
from specjax.bench.sweep import ADAPTIVE, OFF, bench
from specjax.engine.engine import Engine
from specjax.engine.metrics import Metrics
from specjax.host.request import Request
from specjax.host.speculation.methods import adaptive_policy
from specjax.host.speculation.policy import DecodeLoad, Policy, PolicyRule, Round, StaticPolicy

PLOTS = FOLDER / "plots"
KS, BATCHES, MAX_MODEL_LEN = (0, 1, 2, 3, 5), (1, 4, 16, 64), 320
WRONG_KS, WRONG_BATCHES = (0, 1, 3), (1, 16)
SWITCH_STEPS, SWITCH_BATCH = 2000, 4
TAIL_REQUESTS, TAIL_MEDIAN, TAIL_SIGMA, TAIL_LONGEST = 64, 24, 0.9, 160


def main() -> None:
    """Measure the part given by --only, or every part in a separate process; write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--only", choices=PARTS)
    settings = parser.parse_args()
    if settings.only is None:
        for part in PARTS:  # one process cannot hold the programs of all parts
            subprocess.run([sys.executable, *sys.argv, "--only", part], check=True)
        return
    source = provenance(["matplotlib"])
    PLOTS.mkdir(exist_ok=True)
    tables = PARTS[settings.only](settings)
    for table in tables:
        print(f"\n{table['title']}")
        for row in [table["columns"], *table["rows"]]:
            print(*row, sep="\t", flush=True)
    result = {
        "title": f"Dynamic K on a CPU: {settings.only}",
        "description": "demo-llama with its EAGLE-3 drafter, greedy: adaptive K against every "
        f"static K and against an engine without a drafter. Plots: {PLOTS.name}/.",
        "provenance": source,
        "settings": vars(settings),
        "tables": tables,
    }
    write_result(RESULTS / f"dynamic_k_{settings.only}_cpu.json", result)


def make_setup(settings: argparse.Namespace, **others: Any) -> Setup:
    """Return the setup of the demo model. `others` replace fields of the setup."""
    fields = {
        "model": "demo-llama",
        "drafter": {"method": "eagle3", "model": "demo-llama-eagle3"},
        "ks": KS,
        "batch_sizes": BATCHES,
        "max_tokens": settings.max_tokens,
        "max_model_len": MAX_MODEL_LEN,
        "temperature": 0.0,
        "seed": 0,
        "rounds": settings.rounds,
        "dtype": "float32",
    }
    return Setup(**fields | others)


def measure_sweep(setup: Setup) -> list[dict[str, Any]]:
    """Return tables of the tokens per second of every policy at every batch size.

    If drafts are really verified, not synthetically, one more table compares an engine without
    drafter to an engine that has a drafter and uses K = 0.
    """
    report, rates = bench(setup, None, show_progress=False), setup.synthetic_rates
    statics = [f"K={k}" for k in setup.ks]
    name = "nothing accepted" if rates else "the drafter's own acceptance"
    plot_sweep(report, PLOTS / f"sweep_{'wrong' if rates else 'demo'}.png")
    rows, zero = [], []
    for batch, at_size in report["batches"].items():
        policies, best = at_size["policies"], at_size["best_static"]
        speeds = [policies[n]["tokens_per_second"]["median"] for n in (OFF, *statics, ADAPTIVE)]
        ratios = [_cell(policies[ADAPTIVE][to]) for to in ("to_best_static", "to_off")]
        ks = policies[ADAPTIVE]["k_histogram"]
        chosen = ", ".join(f"{k}: {n}" for k, n in ks.items())
        rows.append([int(batch), *speeds, best, *ratios, chosen])
        zero.append([int(batch), _cell(policies["K=0"]["to_off"])])
    note = (
        f"{setup.rounds} rounds, at 1 request 8 and at 4 twice as many, of {setup.max_tokens} "
        "tokens for each request; ratios are of runs in the same round, median (tenth to ninetieth "
        "percentile)."
    )
    tables = [
        {
            "title": f"Tokens per second, {name}",
            "columns": [
                "requests", OFF, *statics, ADAPTIVE, "best static K",
                "adaptive / best static", "adaptive / off", "rounds of adaptive by K",
            ],
            "rows": rows,
            "notes": [note],
        }
    ]  # fmt: skip
    if rates is None:
        tables.append(
            {
                "title": "K = 0 in an engine with a drafter, against an engine without",
                "columns": ["requests", "tokens/s with / without"],
                "rows": zero,
                "notes": [note],
            }
        )
    return tables


def _statics() -> list[str]:
    return [f"K={k}" for k in KS]


def _cell(spread: dict[str, float]) -> list[float]:
    return [spread["median"], spread["p10"], spread["p90"]]


class Cyclic(PolicyRule):
    """A policy that changes K at every step, and records the times of rounds."""

    is_learning = True
    choices = KS

    def __init__(self):
        self.num_steps = 0
        self.times: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self.num_rounds = 0

    def choose(self, load: DecodeLoad) -> int:
        """Return the next K. The order of Ks contains every change from one K to another."""
        self.num_steps += 1
        stride = 1 + self.num_steps // len(KS) % (len(KS) - 1)
        return KS[self.num_steps * stride % len(KS)]

    def observe(self, outcome: Round) -> None:
        """Record the time of a round."""
        self.num_rounds += 1
        if outcome.ms is not None:
            self.times[outcome.batch, outcome.k].append(outcome.ms)


class Steady(Cyclic):
    """A policy that never changes K, for comparison."""

    def __init__(self, k: int):
        super().__init__()
        self.k = k

    def choose(self, load: DecodeLoad) -> int:
        """Return the constant K."""
        return self.k


def measure_switch(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare a run that changes K at each of 2,000 steps with equally long runs of constant K."""
    setup = make_setup(settings, batch_sizes=(SWITCH_BATCH,), max_tokens=96)
    rows = []
    with open_engines(setup, show_progress=False) as engines:
        engine = engines.drafting.engine
        requests = setup.make_requests(SWITCH_BATCH)
        for k in KS:
            engine.set_policy(StaticPolicy(k))
            warm_up(engine, requests)
        expected = serve(engines.plain.engine, requests)[0]
        before, num_runs, num_differing = engine.metrics(), 0, 0
        cyclic, steady = Cyclic(), {k: Steady(k) for k in KS}
        while cyclic.num_rounds < SWITCH_STEPS:
            engine.set_policy(cyclic)
            num_differing += serve(engine, requests)[0] != expected
            engine.set_policy(steady[KS[num_runs % len(KS)]])
            num_differing += serve(engine, requests)[0] != expected
            num_runs += 1
        num_late = engine.metrics().num_compilations - before.num_compilations
    for k in KS:
        switching = cyclic.times[SWITCH_BATCH, k]
        still = steady[k].times[SWITCH_BATCH, k]
        medians = float(np.median(switching)), float(np.median(still))
        slow = [sum(t > 3 * np.median(ts) for t in ts) for ts in (switching, still)]
        worst = [float(max(ts) / np.median(ts)) for ts in (switching, still)]
        rows.append([k, len(switching), len(still), *medians, *worst, *slow])
    return [
        {
            "title": "K changed at every step",
            "columns": [
                "K", "rounds switching", "rounds of one K", "median ms switching",
                "median ms of one K", "slowest / median switching", "slowest / median of one K",
                "over 3 x switching", "over 3 x of one K",
            ],
            "rows": rows,
            "notes": [
                f"{cyclic.num_rounds} steps of {SWITCH_BATCH} requests, every change among K "
                f"{', '.join(map(str, KS))}, and between them runs of one K. Compiled meanwhile: "
                f"{num_late}. Runs whose outputs were not plain decoding's: {num_differing} of "
                f"{2 * num_runs}."
            ],
        }
    ]  # fmt: skip


def serve(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[int]], float]:
    """Run all requests; return their outputs, and the seconds until the last request ended."""
    start = time.perf_counter()
    samples = [sample for request in requests for sample in engine.add(request)]
    while engine.has_work:
        engine.step()
    return [sample.output for sample in samples], time.perf_counter() - start


class Traced:
    """Wraps a policy, and records its choices."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self.choices = policy.choices
        self.is_learning = policy.is_learning
        self.begin = policy.begin
        self.observe = policy.observe
        self.trace: list[tuple[float, int, int]] = []

    def choose(self, load: DecodeLoad) -> int:
        """Return the wrapped policy's choice, and record it with the time and the batch size."""
        k = self._policy.choose(load)
        if load.num_sequences:
            self.trace.append((time.perf_counter(), load.num_sequences, k))
        return k


def measure_tail(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Return tables of rollouts, in which all requests start at once and have lognormal lengths."""
    setup = make_setup(settings, batch_sizes=(TAIL_REQUESTS,), max_tokens=TAIL_LONGEST)
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(TAIL_MEDIAN), TAIL_SIGMA, TAIL_REQUESTS)
    lengths = np.clip(drawn, 4, TAIL_LONGEST).astype(int).tolist()
    with open_engines(setup, show_progress=False) as engines:
        requests = [
            replace(request, max_tokens=length)
            for request, length in zip(setup.make_requests(TAIL_REQUESTS), lengths, strict=True)
        ]
        seconds, traces, acceptance, is_same = run_tail(settings, engines, requests)
    plot_tail(traces[-1], lengths)
    best = min(_statics(), key=lambda name: float(np.median(seconds[name])))
    rows = []
    for name, samples in seconds.items():
        to_best = [b / a for a, b in zip(samples, seconds[best], strict=True)]
        to_off = [b / a for a, b in zip(samples, seconds[OFF], strict=True)]
        rows.append([name, summary(samples), summary(to_best), summary(to_off), acceptance[name]])
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for trace in traces:
        for _, num_sequences, k in trace:
            by_size[1 << (num_sequences - 1).bit_length()].append(k)
    ks = [[size, len(chosen), float(np.mean(chosen))] for size, chosen in sorted(by_size.items())]
    return [
        {
            "title": "A rollout with a long tail",
            "columns": [
                "policy", "makespan, s", f"x {best}", "x off", "acceptance length",
            ],
            "rows": rows,
            "notes": [
                f"{TAIL_REQUESTS} requests of lognormal length, median {TAIL_MEDIAN}, longest "
                f"{max(lengths)}, {sum(lengths)} tokens in all; prompts included in the time. "
                f"{settings.rounds} rounds; outputs identical: {'yes' if is_same else 'NO'}."
            ],
        },
        {
            "title": "What adaptive K chose in it",
            "columns": ["requests up to", "rounds", "mean K"],
            "rows": ks,
            "notes": [f"All rounds; one is drawn in {PLOTS.name}/tail.png."],
        },
    ]  # fmt: skip


def run_tail(
    settings: argparse.Namespace, engines: Engines, requests: Sequence[Request]
) -> tuple[dict[str, list[float]], list[list[tuple[float, int, int]]], dict[str, float], bool]:
    """Run the rollouts with every policy in turn.

    Return makespans by policy, the traces of adaptive K, acceptance lengths by policy, and whether
    all outputs are equal.
    """
    engine = engines.drafting.engine
    measured = adaptive_policy(max(KS))
    engine.set_policy(measured)
    first_cost = deepcopy(measured.cost)
    names = [OFF, *_statics(), ADAPTIVE]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    traces, acceptance, is_same = [], {}, True
    expected = serve(engines.plain.engine, requests)[0]
    for i in range(settings.rounds):
        first = i % len(names)
        for name in [*names[first:], *names[:first]]:
            one = engines.plain.engine if name == OFF else engine
            if name == ADAPTIVE:
                policy = Traced(adaptive_policy(max(KS), deepcopy(first_cost)))
                traces.append(policy.trace)
                engine.set_policy(policy)
            elif name != OFF:
                engine.set_policy(StaticPolicy(int(name.removeprefix("K="))))
            before = one.metrics()
            outputs, took = serve(one, requests)
            seconds[name].append(took)
            acceptance[name] = _acceptance(before, one.metrics(), len(requests))
            is_same &= outputs == expected
    return seconds, traces, acceptance, is_same


def _acceptance(before: Metrics, after: Metrics, num_requests: int) -> float:
    """Return the mean number of tokens per round of a request.

    The first token of each request is not counted, because it comes from the prompt.
    """
    num_tokens = after.num_generation_tokens - before.num_generation_tokens - num_requests
    return num_tokens / (num_tokens - (after.num_accepted_tokens - before.num_accepted_tokens))


def plot_tail(trace: Sequence[tuple[float, int, int]], lengths: Sequence[int]) -> None:
    """Plot the number of running requests and the chosen K over time."""
    start = trace[0][0]
    times = [moment - start for moment, _, _ in trace]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    left.step(times, [n for _, n, _ in trace], where="post", color="tab:blue")
    left.set_xlabel("seconds")
    left.set_ylabel("requests that decode", color="tab:blue")
    right = left.twinx()
    right.step(times, [k for _, _, k in trace], where="post", color="tab:red", linewidth=0.8)
    right.set_ylabel("K", color="tab:red")
    right.set_ylim(-0.2, max(KS) + 0.2)
    figure.suptitle(f"demo-llama, {len(lengths)} requests of lognormal length, adaptive K")
    figure.savefig(PLOTS / "tail.png", dpi=120)


PARTS = {
    "sweep": lambda settings: measure_sweep(make_setup(settings)),
    "wrong": lambda settings: measure_sweep(
        make_setup(
            settings,
            ks=WRONG_KS,
            batch_sizes=WRONG_BATCHES,
            synthetic_rates=(0.0,) * max(WRONG_KS),
        )
    ),
    "switch": measure_switch,
    "tail": measure_tail,
}


if __name__ == "__main__":
    main()
