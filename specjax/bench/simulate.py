"""`specjax bench simulate`: simulates a policy on a profile, and compares it with an oracle."""

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from specjax.bench.stages import stages
from specjax.bench.table import format_table
from specjax.checks import check_positive
from specjax.config import growing
from specjax.host.speculation.methods import make_policy, spread_ks
from specjax.host.speculation.profile import Profile
from specjax.host.speculation.simulator import Outcome, Workload, World, simulate

MAX_SHIFT = 50  # log-odds at which all drafts are accepted, or none
MAX_CONTEXT = 10_000_000  # tokens, about the longest context of models


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """Options of `specjax bench simulate`."""

    profile: str
    policy: str
    acceptance_shift: float
    seeds: int
    requests: int
    context: int = 0
    one_k: bool = False
    text_acceptance: float = 0.0

    def __post_init__(self):
        check_positive(**{"--seeds": self.seeds, "--requests": self.requests})
        if not 0 <= self.context <= MAX_CONTEXT:
            raise ValueError(
                f"--context {self.context} must be a number of tokens in 0..{MAX_CONTEXT}"
            )
        if not 0 <= self.text_acceptance < 1:
            raise ValueError(
                f"--text-acceptance {self.text_acceptance} must be a rate in [0, 1); 0: no texts"
            )
        if not abs(self.acceptance_shift) <= MAX_SHIFT:
            raise ValueError(
                f"--acceptance-shift {self.acceptance_shift} must be in -{MAX_SHIFT}.."
                f"{MAX_SHIFT}, in log-odds; 0 leaves it unchanged"
            )


def run(args: argparse.Namespace) -> int:
    """Run `specjax bench simulate`."""
    settings = SimulationSettings(
        profile=args.profile,
        policy=args.policy,
        acceptance_shift=args.acceptance_shift,
        seeds=args.seeds,
        requests=args.requests,
        context=args.context,
        one_k=args.one_k,
        text_acceptance=args.text_acceptance,
    )
    report = bench(settings, Profile.read(settings.profile), show_progress=True)
    print(json.dumps(report, indent=2) if args.json else describe(report))
    return 0


def bench(
    settings: SimulationSettings, profile: Profile, *, show_progress: bool = False
) -> dict[str, Any]:
    """Run the policy and the oracle on the same requests, for each seed.

    The oracle knows the true rates, and takes the best K in every round. A policy's regrets are
    fractions of the oracle's goodput. The report has them per seed, as the mean over seeds, and per
    batch size. The regret of a batch size covers the time that all seeds spent at that size.
    """
    batches = growing(1, max(profile.step_ms), 2)
    try:
        make_policy(settings.policy, profile, batches)
    except ValueError as error:
        raise ValueError(f"--policy {error}") from error
    world = World(
        profile.cost(spread_ks(profile.max_drafts), ()),
        profile.rates,
        batches,
        shift=settings.acceptance_shift,
    )
    seeds, ran, ideal = range(settings.seeds), [], []
    total = 2 * settings.seeds
    with stages(total, show_progress=show_progress, work="simulating") as begin:
        for seed in seeds:
            workload = _workload(settings, seed)
            policy = make_policy(settings.policy, profile, batches)  # has learned nothing
            by_request = policy.weighs_requests and policy.is_learning and not settings.one_k
            begin(f"{settings.policy}, seed {seed}")
            ran.append(simulate(world, workload, policy, seed, by_request=by_request))
            begin(f"the oracle, seed {seed}")
            ideal.append(simulate(world, workload, None, seed))
    ratios = [a.makespan_ms / b.makespan_ms for a, b in zip(ran, ideal, strict=True)]
    by_batch = pool_regret(ran)
    return {
        "policy": settings.policy,
        "regret_mean": fmean(outcome.regret for outcome in ran),
        "regret_worst_batch": max(by_batch.values()),
        "makespan_ratio_to_oracle": fmean(ratios),
        "regret_by_batch": by_batch,
        "k_histogram": dict(sorted(sum((o.k_histogram for o in ran), Counter()).items())),
        "request_k_histogram": dict(
            sorted(sum((o.request_k_histogram for o in ran), Counter()).items())
        ),
        "split_rounds": sum(o.num_split for o in ran) / sum(len(o.trace) for o in ran),
        "seeds": list(seeds),
        "regret_by_seed": [outcome.regret for outcome in ran],
        "makespan_ratio_by_seed": ratios,
        "settings": asdict(settings),
    }


def _workload(settings: SimulationSettings, seed: int) -> Workload:
    # This random stream is a separate one, because `simulate` uses `seed` itself.
    workload = Workload.rollout(random.Random(f"workload {seed}"), settings.requests)
    if settings.context:
        contexts = [settings.context * (i % 2) for i in range(settings.requests)]
        workload = replace(workload, contexts=contexts)
    if settings.text_acceptance:
        texts = [settings.text_acceptance * (i % 2 == 0) for i in range(settings.requests)]
        workload = replace(workload, texts=texts)
    return workload


def pool_regret(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """Return the policy's regret over all runs, by padded batch size."""
    batches = sorted({batch for outcome in outcomes for batch in outcome.ms_by_batch})
    return {
        batch: sum(outcome.lost_by_batch[batch] for outcome in outcomes)
        / sum(outcome.ms_by_batch[batch] for outcome in outcomes)
        for batch in batches
    }


def describe(report: dict[str, Any]) -> str:
    """Return the report as text."""
    settings, histogram = report["settings"], report["k_histogram"]
    by_request = report["request_k_histogram"]
    num_rounds = sum(histogram.values())
    tables = [
        [
            ["over seeds", "mean", "least", "most"],
            ["regret", *_spread(report["regret_by_seed"], ".1%")],
            ["makespan / oracle's", *_spread(report["makespan_ratio_by_seed"], ".3f")],
        ],
        [
            ["batch", *map(str, report["regret_by_batch"])],
            ["regret", *(f"{regret:.1%}" for regret in report["regret_by_batch"].values())],
        ],
        [
            ["K", *map(str, histogram)],
            ["rounds", *(f"{count / num_rounds:.1%}" for count in histogram.values())],
        ],
        [
            ["drafts of a request", *map(str, by_request)],
            ["rounds", *(f"{n / sum(by_request.values()):.1%}" for n in by_request.values())],
        ],
    ]
    texts = []
    if rate := settings["text_acceptance"]:
        texts = [f"drafts of the other requests come from texts; {rate:.0%} of them are accepted"]
    lines = [
        f"{report['policy']} on {settings['profile']}",
        f"{settings['seeds']} seeds of {settings['requests']} requests; half-way, log-odds of "
        f"acceptance change by {settings['acceptance_shift']:g}; prompts of every second request "
        f"have {settings['context']} tokens",
        *texts,
        f"in {report['split_rounds']:.1%} of the rounds, only some requests drafted; the oracle "
        "takes one K for all",
    ]
    return "\n\n".join([*map(format_table, tables), "\n".join(lines)])


def _spread(values: Sequence[float], spec: str) -> list[str]:
    return [format(value, spec) for value in (fmean(values), min(values), max(values))]
