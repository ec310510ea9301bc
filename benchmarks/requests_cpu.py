"""Measures adaptive K per request on the demo: half of a batch accepts most drafts, half few.

    python benchmarks/requests_cpu.py

Verification is synthetic: a request accepts each draft with a probability that depends on its seed,
so outputs are not the model's. The first rounds, while adaptive K learns, are not counted. Policies
take turns in one process.
"""

import argparse
import time
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, repeat
from operator import mul
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
from report import RESULTS, provenance, summary, write_result

from specjax import LLM, SamplingParams
from specjax.device.verification import Draft, Synthetic, Target, Verdict
from specjax.engine.engine import Engine
from specjax.engine.programs import Decode, SplitRound
from specjax.host.request import Request
from specjax.host.speculation.acceptance import Acceptance
from specjax.host.speculation.policy import GoodputPolicy, Policy, StaticPolicy
from specjax.host.speculation.rounds import DecodeLoad, SplitShape
from specjax.host.speculation.step_cost import StepCost
from specjax.serving import assembly

KS, RATES = (0, 1, 3), (0.9, 0.1)
PROMPT, MAX_MODEL_LEN = 16, 1024


@dataclass(frozen=True)
class Halves(Synthetic):
    """Synthetic acceptance: at `rates` for requests with even seeds, at `low` for odd seeds."""

    low: tuple[float, ...] = ()

    def verify(self, draft: Draft, target: Target) -> Verdict:
        """See `Verification.verify`."""
        high = Synthetic(self.rates).verify(draft, target)
        low = Synthetic(self.low).verify(draft, target)
        is_even = target.sampling.seeds % 2 == 0
        return Verdict(
            jnp.where(is_even[:, None], high.tokens, low.tokens),
            jnp.where(is_even, high.num_accepted, low.num_accepted),
        )


class Whole(GoodputPolicy):
    """Adaptive K that is the same for all requests."""

    def choose(self, load: DecodeLoad) -> int:
        """Choose one K for the whole batch."""
        return super().choose(replace(load, splits=None))


def main() -> None:
    """Run the measurements, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--warm-up", type=int, default=30, help="steps; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    settings = parser.parse_args()
    source = provenance()
    high, low = (tuple(accumulate(repeat(rate, KS[-1]), mul)) for rate in RATES)
    speculation = {
        "method": "eagle3",
        "model": "demo-llama-eagle3",
        "num_speculative_tokens": KS[-1],
        "verification": "synthetic",
        "synthetic_acceptance_rates": list(high),
    }
    n = settings.requests
    with (
        patch.object(assembly, "make_verification", lambda config: Halves(high, low=low)),
        LLM(
            "demo-llama",
            speculative_config=speculation,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=n,
            decode_batches=(n // 2, n),
            prefill_shapes=((n, PROMPT),),
            max_num_batched_tokens=n * PROMPT,
            enable_prefix_caching=False,
            compile_ahead=True,
        ) as llm,
    ):
        engine = llm.engine
        engine.set_policy(new_policy(GoodputPolicy, None))
        compile_splits(engine, n)
        speeds, drafts = measure(engine, settings)
    best = max((name for name in speeds if name[0] == "K"), key=lambda one: np.median(speeds[one]))
    rows = []
    for name, found in speeds.items():
        ratios = [a / b for a, b in zip(found, speeds[best], strict=True)]
        rows.append([name, summary(found), summary(ratios), *drafts[name]])
    table = {
        "title": f"{n} requests, whose halves accept {RATES[0]:.0%} and {RATES[1]:.0%} of drafts",
        "columns": ["policy", "tokens/s", f"x {best}", "drafts of one half", "of the other"],
        "rows": rows,
        "notes": [
            f"{settings.rounds} runs of {settings.steps} steps, after {settings.warm_up} that are "
            f"not counted; ratios are of runs in the same turn. K is one of {KS}. Drafts are means "
            "per round of a request."
        ],
    }
    for row in [table["columns"], *rows]:
        print(*row, sep="\t", flush=True)
    result = {
        "title": "Drafts per request on a CPU",
        "description": "demo-llama with its EAGLE-3 head, synthetic acceptance.",
        "provenance": source,
        "settings": vars(settings),
        "tables": [table],
    }
    write_result(RESULTS / "requests_cpu.json", result)


def compile_splits(engine: Engine, n: int) -> None:
    """Compile the rounds in which half of the requests draft K tokens, and the others none."""
    programs = engine.programs
    variant = next(one.variant for one in programs.ready if isinstance(one, Decode))
    shapes = [SplitShape(n // 2, k, n // 2) for k in KS[1:]]
    programs.compile_ahead([SplitRound(one, variant) for one in shapes], show_progress=False)


def measure(
    engine: Engine, settings: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return tokens/s of each policy's runs, and its mean drafts in each half of the requests."""
    policies: dict[str, Any] = {f"K={k}": partial(StaticPolicy, k) for k in KS}
    measured = engine.scheduler.policy
    assert isinstance(measured, GoodputPolicy)
    cost = deepcopy(measured.cost)
    for name, kind in ("adaptive, one K", Whole), ("adaptive", GoodputPolicy):
        policies[name] = partial(new_policy, kind, cost)
    speeds: dict[str, list[float]] = {name: [] for name in policies}
    drafts: dict[str, list[float]] = {}
    for i in range(settings.rounds):
        names = [*policies][i % len(policies) :] + [*policies][: i % len(policies)]
        for name in names:
            speed, drafts[name] = run(engine, policies[name](), settings)
            speeds[name].append(speed)
    return speeds, drafts


def new_policy(kind: type[GoodputPolicy], cost: StepCost | None) -> GoodputPolicy:
    """Return an adaptive policy that has not yet learned acceptance rates.

    `cost` has the times of rounds. If it is None, the engine measures them.
    """
    return kind(KS, deepcopy(cost), Acceptance(KS[-1]))


def run(engine: Engine, policy: Policy, settings: argparse.Namespace) -> tuple[float, list[float]]:
    """Return tokens per second with a policy, and the mean drafts of each half of the requests."""
    engine.set_policy(policy)
    max_tokens = MAX_MODEL_LEN - PROMPT
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    samples = []
    for i in range(settings.requests):
        prompt = tuple(1 + (7 * i + j) % 500 for j in range(PROMPT))
        samples += engine.add(Request(i, prompt, params, max_tokens, (i,)))
    while not all(sample.num_output for sample in samples):
        engine.step()
    for _ in range(settings.warm_up):
        engine.step()
    before = [sample.num_output for sample in samples]
    rounds = [len(sample.rounds) for sample in samples]
    start = time.perf_counter()
    for _ in range(settings.steps):
        engine.step()
    seconds = time.perf_counter() - start
    num_tokens = sum(sample.num_output for sample in samples) - sum(before)
    drafts = [sum(s.rounds[first::2]) for s, first in zip(samples, rounds, strict=True)]
    for sample in samples:
        engine.abort(sample.request.request_id)
    while engine.has_work:
        engine.step()
    halves = [sum(drafts[i::2]) / len(drafts[i::2]) / settings.steps for i in range(2)]
    return num_tokens / seconds, halves


if __name__ == "__main__":
    main()
