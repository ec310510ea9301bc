"""Checks that speculation gives the same tokens as plain decoding with the same seeds.

python benchmarks/seed_exact.py
python benchmarks/seed_exact.py --exact

Prompts are the held-out questions that ship with specjax, each cut at several lengths. Every output
is compared with the output of an engine without a drafter, token by token. A difference is allowed
if it is a near-tie: the two best scores lie within 2e-4. With --exact, the engines run in
exact mode, and no difference is allowed.
"""

import argparse
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from report import RESULTS, provenance, write_result

from specjax import LLM, SamplingParams
from specjax.bench.identity import Identity, compare
from specjax.bench.workload import read_questions, tokenize
from specjax.device.drafters.drafter import DraftContext, NoDrafter, Params
from specjax.device.models.model import Model
from specjax.device.verification import Draft
from specjax.engine.engine import Engine
from specjax.host.request import Request
from specjax.host.speculation.policy import DecodeLoad, PolicyRule, StaticPolicy

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
BATCH, KS = 16, (1, 3, 5)
TEMPERATURES = 0.0, 0.3, 0.7, 1.0
SETS: dict[str, dict[str, Any]] = {
    "temperature alone": {},
    "top-k, top-p, min-p, penalties": {
        "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.1,
    },
    "logit_bias, bad_words, allowed ids, min_tokens": {
        "logit_bias": {10: 2.0, 300: -3.0}, "bad_words": ["the", "She"], "min_tokens": 6,
        "allowed_token_ids": list(range(1, 1900)),
    },
}  # fmt: skip


@dataclass(frozen=True)
class WrongDrafter(NoDrafter):
    """A drafter whose drafts are accepted only by chance."""

    def draft(
        self, target: Model, params: Params, state: None, context: DraftContext, k: int
    ) -> tuple[Draft, None]:
        """Return token ids unrelated to the request."""
        place = context.starts[:, None] + jnp.arange(k)[None]
        return Draft((7 * place) % target.vocab_size, None), state


@dataclass(frozen=True)
class EveryK(PolicyRule):
    """A policy that changes K at every step."""

    choices: tuple[int, ...] = (0, *KS)
    order: Iterator[int] = field(default_factory=lambda: itertools.cycle((3, 0, 5, 1)))

    def choose(self, load: DecodeLoad) -> int:
        """Return the next K, regardless of the load."""
        return next(self.order)


@dataclass(frozen=True)
class Work:
    """Requests, and the outputs that they have in plain decoding."""

    name: str
    requests: list[Request]
    expected: list[list[int]]


def main() -> int:
    """Run every configuration, compare its outputs, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--exact", action="store_true", help="in exact mode, without near-ties")
    settings = parser.parse_args()
    source = provenance()
    with make_llm(settings) as plain:
        works = [
            make_work(plain, *case, settings) for case in itertools.product(TEMPERATURES, SETS)
        ]
    rows, total = [], Identity()
    for name, make in configurations(settings):
        engine, policies = make()
        for k, policy in policies.items():
            engine.set_policy(policy)
            found = Identity()
            for work in works:
                outputs = run(engine, work.requests)
                pairs = [(request, 0) for request in work.requests]
                found += compare(engine, pairs, work.expected, outputs)
            rows.append([name, k, found.num_outputs, found.num_tokens, len(found.near_ties),
                         len(found.mismatches)])  # fmt: skip
            print(*rows[-1], *found.near_ties, *found.mismatches, sep="\n  ", flush=True)
            total += found
            write(settings, source, rows, total)
        # Free the programs, because a process may have at most 65,530 memory maps.
        del engine
        jax.clear_caches()
        gc.collect()
    return int(bool(total.mismatches or (settings.exact and total.near_ties)))


def write(
    settings: argparse.Namespace, source: dict[str, Any], rows: list[list[Any]], total: Identity
) -> None:
    """Write a result with the comparisons so far."""
    summary = (
        f"{total.num_tokens} tokens compared, {len(total.near_ties)} near-ties, "
        f"{len(total.mismatches)} mismatches"
    )
    mode = ", in exact mode" if settings.exact else ""
    table = {
        "title": summary,
        "columns": ["drafts", "K", "outputs", "tokens compared", "near-ties", "mismatches"],
        "rows": rows,
        "notes": [
            f"Temperatures {', '.join(map(str, TEMPERATURES))}, each with: {'; '.join(SETS)}.",
            "Tokens are compared up to the first difference of an output.",
        ],
    }
    result = {
        "title": f"Same seed, same tokens{mode}",
        "description": f"demo-llama in float32, {settings.prompts} prompts, {settings.max_tokens} "
        f"tokens each, against an engine without a drafter at batch {BATCH}{mode}.",
        "provenance": source,
        "settings": vars(settings),
        "tables": [table],
        "samples": {"near_ties": total.near_ties, "mismatches": total.mismatches},
    }
    write_result(RESULTS / f"seed_exact{'_bitwise' if settings.exact else ''}.json", result)


def make_llm(settings: argparse.Namespace, head: str | None = None, batch: int = BATCH) -> LLM:
    """Open the demo model with the drafter named `head`, or without a drafter if it is None."""
    speculation = head and {
        "method": "eagle" if head == "eagle1" else head,
        "model": str(CHECKPOINTS / f"demo-llama-{head}"),
        "num_speculative_tokens": max(KS),
    }
    return LLM(
        CHECKPOINTS / "demo-llama",
        speculative_config=speculation or None,
        max_num_seqs=batch,
        max_model_len=256,
        max_num_batched_tokens=256,
        max_logprobs=0,
        compile_ahead=True,
        exact=settings.exact,
    )


def configurations(
    settings: argparse.Namespace,
) -> Iterator[tuple[str, Callable[[], tuple[Engine, dict[str, Any]]]]]:
    """Yield pairs of a name and a function that makes an engine.

    The function returns the engine, and the policies to run, by name.
    """
    static = {str(k): StaticPolicy(k) for k in KS}

    def eagle(head, batch, policies):
        return lambda: (make_llm(settings, head, batch).engine, policies)

    def plain(batch, drafter, policies):
        def make():
            engine = make_llm(settings, batch=batch).engine
            if drafter is None:
                return engine, policies
            params, policy = Params(engine.params.target, None), next(iter(policies.values()))
            return Engine(engine.config, engine.target, drafter, params, policy), policies

        return make

    changing = {"changing": EveryK()}
    yield "none, batch 1", plain(1, None, {"0": StaticPolicy(0)})
    yield "eagle3", eagle("eagle3", BATCH, static | changing)
    yield "eagle1", eagle("eagle1", BATCH, static | changing)
    yield "always wrong", plain(BATCH, WrongDrafter(), {"3": StaticPolicy(3)})
    yield "eagle3, batch 1", eagle("eagle3", 1, {"3": StaticPolicy(3)})


def make_work(plain: LLM, temperature: float, name: str, settings: argparse.Namespace) -> Work:
    """Return requests for questions that are cut at several lengths, each with another seed."""
    assert plain.tokenizer is not None
    questions = tokenize(read_questions(), plain.tokenizer)
    cuts = -(-settings.prompts // len(questions))
    prompts = [q[: len(q) * (cuts - cut) // cuts] for cut in range(cuts) for q in questions]
    requests = [
        plain.request_maker.make(
            prompt,
            SamplingParams(
                temperature=temperature, seed=i, max_tokens=settings.max_tokens, **SETS[name]
            ),
            i,
            f"prompt {i}",
        )
        for i, prompt in enumerate(prompts[: settings.prompts])
    ]
    return Work(f"temperature {temperature}, {name}", requests, run(plain.engine, requests))


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """Run requests that have one sample each, and return their outputs."""
    engine.prepare(requests)
    for request in requests:
        engine.add(request)
    outputs: dict[int, list[int]] = {}
    while engine.has_work:
        outputs |= {sample.request.request_id: sample.output for sample in engine.step()}
    return [outputs[request.request_id] for request in requests]


if __name__ == "__main__":
    sys.exit(main())
