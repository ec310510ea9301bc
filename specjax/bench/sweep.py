"""`specjax bench sweep`: compares static K, dynamic K and no speculation by batch size."""

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from specjax.bench.devices import Devices, set_policies
from specjax.bench.engines import (
    Engines,
    Setup,
    histograms,
    open_engines,
    read_setup,
    warm_up,
)
from specjax.bench.environment import describe_environment, describe_processors
from specjax.bench.measure import decode
from specjax.bench.report import Spread
from specjax.bench.stages import stages
from specjax.bench.table import format_table
from specjax.checkpoint.writing import check_writable
from specjax.host.speculation.methods import adaptive_policy, make_policy
from specjax.host.speculation.policy import Policy, StaticPolicy
from specjax.host.speculation.profile import Profile

SCHEMA_VERSION = 1
OFF, ADAPTIVE = "off", "adaptive"
PLOT, PLOTTING = "sweep.png", "specjax.bench.plot"  # a module that needs an extra


def run(args: argparse.Namespace) -> int:
    """Run `specjax bench sweep`."""
    setup = read_setup(args)
    plot = args.plot or (PLOT if find_spec("matplotlib") else None)
    if plot is not None:
        import_module(PLOTTING)
    for option, name in ("--plot", plot), ("--output", args.output):
        if name:
            check_writable(option, Path(name))
    profile = Profile.read(args.profile) if args.profile else None
    report = bench(setup, profile, show_progress=True)
    text = json.dumps(report, indent=2)
    if args.output:
        Path(args.output).write_text(text + "\n")
    print(text if args.json else describe(report))
    if plot is not None:
        import_module(PLOTTING).plot_sweep(report, Path(plot))
    if not args.json:
        extra = "not plotted; pip install 'specjax[plot]' for it"
        print(extra if plot is None else f"plotted in {plot}")
    return 0


def bench(setup: Setup, profile: Profile | None, *, show_progress: bool) -> dict[str, Any]:
    """Measure every policy at every batch size. The policies take turns. Return the JSON report."""
    runs: dict[int, dict[str, list[dict[str, Any]]]] = {}
    workloads = {size: setup.make_requests(size) for size in setup.batch_sizes}
    with open_engines(setup, show_progress=show_progress) as engines, ExitStack() as stack:
        policies = make_policies(setup, profile, engines)
        names = [OFF, *policies]
        total = sum(num_rounds(setup, size) for size in setup.batch_sizes) * len(names)
        begin = stack.enter_context(stages(total, show_progress=show_progress))
        for batch_size, requests in workloads.items():
            warm_up(engines.plain.engine, requests)
            for k in setup.ks:
                set_policies(engines.drafting.engine, partial(StaticPolicy, k))
                warm_up(engines.drafting.engine, requests)
            at_size = runs[batch_size] = {name: [] for name in names}
            for i in range(num_rounds(setup, batch_size)):
                first = i % len(names)
                for name in [*names[first:], *names[:first]]:
                    begin(f"{name} at batch size {batch_size}")
                    engine = (engines.plain if name == OFF else engines.drafting).engine
                    if name != OFF:
                        set_policies(engine, policies[name])
                    before = engine.metrics()
                    ran = decode(engine, requests)
                    figures = {
                        "tokens_per_second": ran.tokens_per_second,
                        "tpot_ms": ran.ms_per_token,
                        "mean_acceptance_length": ran.num_tokens / ran.num_request_steps,
                        **histograms(engine, before),
                        "outputs": ran.outputs,
                    }
                    at_size[name].append(figures)
        num_late = sum(llm.metrics().num_compiles_after_warmup for llm in engines)
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "sweep",
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": describe_environment(),
        "settings": asdict(setup) | {"method": setup.name},
        "num_compiles_while_measuring": num_late,
        "batches": {str(b): summarise(at_size) for b, at_size in runs.items()},
    }


def num_rounds(setup: Setup, batch_size: int) -> int:
    """Return the number of runs per policy.

    Small batches get more runs, because their times are noisier.
    """
    return setup.rounds * max(1, 8 // batch_size)


def make_policies(
    setup: Setup, profile: Profile | None, engines: Engines
) -> dict[str, Callable[[], Policy]]:
    """Return a factory for each policy, by the policy's name.

    Each call of a factory returns a new policy, which has learned nothing from earlier runs.
    """
    engine, max_k = engines.drafting.engine, max(setup.ks)
    measured, *_ = set_policies(engine, partial(adaptive_policy, max_k))
    first_cost = deepcopy(measured.cost)

    def adaptive() -> Policy:
        return adaptive_policy(max_k, deepcopy(first_cost))

    policies: dict[str, Callable[[], Policy]] = {
        f"K={k}": lambda k=k: StaticPolicy(k) for k in setup.ks
    }
    batches = engine.config.decode_batches
    if profile is not None:
        for name in "table", "profile":
            policies[name] = lambda name=name: make_policy(name, profile, batches)
            set_policies(engine, policies[name])
    return policies | {ADAPTIVE: adaptive}


def summarise(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of one batch size. Ratios compare runs of the same round."""
    speeds = {name: [one["tokens_per_second"] for one in ran] for name, ran in runs.items()}
    best = max((name for name in runs if name.startswith("K=")), key=lambda n: median(speeds[n]))

    def ratio(name: str, other: str) -> Spread:
        return Spread.of([a / b for a, b in zip(speeds[name], speeds[other], strict=True)])

    policies = {}
    for name, ran in runs.items():
        to_best = ratio(name, best)
        policies[name] = {
            "tpot_ms": asdict(Spread.of([one["tpot_ms"] for one in ran])),
            "tokens_per_second": asdict(Spread.of(speeds[name])),
            "mean_acceptance_length": median(one["mean_acceptance_length"] for one in ran),
            "to_best_static": asdict(to_best),
            "to_off": asdict(ratio(name, OFF)),
            "regret": 1 - to_best.median,
            "k_histogram": _added(one["k_histogram"] for one in ran),
            "request_k_histogram": _added(one["request_k_histogram"] for one in ran),
            "num_differing": _count_differing(ran, runs[OFF]),
        }
    return {"best_static": best, "policies": policies}


def _added(histograms: Any) -> dict[str, int]:
    total: dict[int, int] = {}
    for histogram in histograms:
        for k, count in histogram.items():
            total[k] = total.get(k, 0) + count
    return {str(k): total[k] for k in sorted(total)}


def _count_differing(ran: Sequence[dict[str, Any]], off: Sequence[dict[str, Any]]) -> int:
    """Count the outputs whose tokens differ from decoding without speculation."""
    expected = off[0]["outputs"]
    return len({key for one in ran for key in expected if one["outputs"][key] != expected[key]})


def describe(report: dict[str, Any]) -> str:
    """Return the report as text."""
    batches, settings = report["batches"], report["settings"]
    names = list(next(iter(batches.values()))["policies"])

    def cells(field: str, spec: str) -> list[list[str]]:
        rows = []
        for batch, at_size in batches.items():
            values = [at_size["policies"][name][field] for name in names]
            shown = [v["median"] if isinstance(v, dict) else v for v in values]
            rows.append([batch, *(format(v, spec) for v in shown), at_size["best_static"]])
        return rows

    header = ["batch", *names, "best K"]
    differing = sum(p["num_differing"] for b in batches.values() for p in b["policies"].values())
    environment = report["environment"]
    machine = environment["device_kind"]
    if environment["platform"] == "cpu":
        machine = describe_processors(environment)
    return "\n".join(
        [
            "ms per output token of a request",
            format_table([header, *cells("tpot_ms", ".2f")]),
            "",
            "tokens per second, relative to the best static K in the same round",
            format_table([header, *cells("to_best_static", ".3f")]),
            "",
            "acceptance length",
            format_table([header, *cells("mean_acceptance_length", ".2f")]),
            "",
            f"outputs that differ from decoding without speculation: {differing}",
            f"{settings['model']} with {settings['method']}, {settings['dtype']}, "
            f"quantization {settings['quantization'] or 'none'}, temperature "
            f"{settings['temperature']:g}, {settings['max_tokens']} tokens each; medians over "
            f"{settings['rounds']} runs or more; "
            f"{Devices(**settings['devices']).describe(machine)}",
            "off: an engine without a drafter; adaptive begins each run knowing only the times "
            "that the engine measured at its start",
        ]
    )
