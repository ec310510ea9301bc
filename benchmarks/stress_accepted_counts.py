"""Stress test of accepted counts: compares a hybrid's outputs with requests that run alone.

    python benchmarks/stress_accepted_counts.py
    python benchmarks/stress_accepted_counts.py --model demo-qwen3.5 --exact

A recurrent state is advanced by the number of accepted tokens, which only the device knows when the
host launches the next step. If the number came late, or from another request, the state would be
wrong. Tokens would then change, but not at once and not always. So requests of different lengths
join and leave slots all the time, at temperature 1 and with asynchronous scheduling. Every output
must equal the output of an engine with one slot and no drafter. A difference is allowed if it is a
near-tie: the two best scores lie within 2e-4. With --exact, the engines run in exact mode, and
no difference is allowed.
"""

import argparse
import itertools
import math
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from report import RESULTS, provenance, write_result

from pallas_kernels.gated_delta_rule import Heads
from specjax import LLM, SamplingParams
from specjax.bench.identity import NEAR_TIE, Identity, compare
from specjax.bench.workload import read_questions, tokenize
from specjax.checkpoint.save import save_checkpoint
from specjax.device.drafters.mtp import MTPHead
from specjax.device.models import qwen3_5
from specjax.device.models.layers.rope import Rope
from specjax.device.models.qwen3_5 import ATTENTION, DELTA, Qwen35
from specjax.engine.engine import Engine
from specjax.engine.metrics import Metrics
from specjax.host.request import Request
from specjax.train.target import init_params

RANDOM = Qwen35(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    layer_types=(DELTA, DELTA, ATTENTION),
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    delta_heads=Heads(num_keys=1, num_values=2, key_dim=16, value_dim=16),
    conv_width=4,
    rms_norm_eps=1e-6,
    rope=Rope(head_dim=4),
    max_position=512,
    num_mtp_layers=1,
)
LONGEST_PROMPT, FEWEST_TOKENS = 40, 4
CHUNK = 32  # prompt tokens per step with one slot; with many slots, twice this number
# The mean number of requests that arrive before a step. Rounds have these rates in turn.
ARRIVALS = {"all at once": math.inf, "one by one": 0.1}

Outputs = dict[tuple[int, int], list[int]]  # by request id and index of the sample


@dataclass
class Tally:
    """The results of the rounds with one arrival rate."""

    rounds: int = 0
    found: Identity = field(default_factory=Identity)
    shortest: int = sys.maxsize
    num_tokens: int = 0
    seconds: float = 0.0
    seconds_alone: float = 0.0

    def row(self, name: str) -> list[Any]:
        """Return the tally as a row of the table."""
        return [
            name, self.rounds, self.found.num_outputs, self.num_tokens,
            len(self.found.near_ties), len(self.found.mismatches), self.shortest,
            self.num_tokens / self.seconds, self.num_tokens / self.seconds_alone,
        ]  # fmt: skip


COLUMNS = [
    "requests arrive", "rounds", "generations", "tokens", "near-ties", "mismatches",
    "shortest output", "tokens/s", "tokens/s alone",
]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the engines, and run every round. Return the exit status."""
    settings = read_settings(arguments)
    source = provenance()
    with tempfile.TemporaryDirectory() as folder:
        if settings.model == "random":
            write_random(Path(folder))
        llm, alone = make_llms(folder if settings.model == "random" else settings.model, settings)
        with llm, alone:
            return run_rounds(llm, alone, settings, source)


def run_rounds(llm: LLM, alone: LLM, settings: argparse.Namespace, source: dict[str, Any]) -> int:
    """Run and compare every round, and write the result after each round.

    Return 0 if all outputs are equal. Return 1 if outputs differ. Return 1, too, if not each of the
    numbers 0 to K of accepted drafts occurred, because the run then shows little.
    """
    tallies: dict[str, Tally] = {}
    shares = [0.0]
    for number in range(settings.rounds):
        name = list(ARRIVALS)[number % len(ARRIVALS)]
        tally = tallies.setdefault(name, Tally())
        run_round(llm, alone, settings, number, ARRIVALS[name], tally)
        print(*(f"{c}: {_text(x)}" for c, x in zip(COLUMNS, tally.row(name), strict=True)),
              sep="  ", flush=True)  # fmt: skip
        shares = accepted_shares(llm.metrics())
        write(settings, source, tallies, shares)
    total = sum((tally.found for tally in tallies.values()), Identity())
    print("accepted", *(f"{count}: {share:.3f}" for count, share in enumerate(shares)), sep="  ")
    print(*total.near_ties, *total.mismatches, sep="\n")
    is_same = not total.mismatches and not (settings.exact and total.near_ties)
    return 0 if is_same and min(shares) > 0 else 1


def read_settings(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="random", help="hybrid with an MTP module, or a small one made here"
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--k", type=int, default=3, help="drafts per step")
    parser.add_argument("--slots", type=int, default=16, help="requests that run together")
    parser.add_argument("--max-tokens", type=int, default=24, help=f"at least {FEWEST_TOKENS}")
    parser.add_argument("--exact", action="store_true", help="in exact mode, without near-ties")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the result goes")
    settings = parser.parse_args(arguments)
    if settings.max_tokens < FEWEST_TOKENS:
        parser.error(f"--max-tokens {settings.max_tokens} must be at least {FEWEST_TOKENS}")
    if settings.json is None:
        mode = "_bitwise" if settings.exact else ""
        settings.json = RESULTS / f"stress_accepted_counts{mode}.json"
    return settings


def write_random(folder: Path, model: Qwen35 = RANDOM) -> None:
    """Write a small untrained hybrid and its MTP module.

    The drafter and the target sample with the same noise. Their logits are not larger than the
    noise, so that some drafts are accepted with any weights. The embedding is small compared to the
    layers' outputs, so that tokens depend on the states.
    """
    head = MTPHead(model)
    specs = model.specs(), head.specs()
    keys = map(jax.random.key, range(len(specs)))
    init = [jax.jit(partial(init_params, spec)) for spec in specs]
    params = tuple(make(key) for make, key in zip(init, keys, strict=True))
    config = qwen3_5.to_hf(model)
    save_checkpoint(folder, specs, params, config, dtype=np.dtype(np.float32))


def make_llms(folder: str | Path, settings: argparse.Namespace) -> tuple[LLM, LLM]:
    """Return an engine with the MTP module and many slots, and a plain engine with one slot."""
    common = {
        "max_model_len": LONGEST_PROMPT + settings.max_tokens,
        "max_logprobs": 0,
        "exact": settings.exact,
        "verbose": False,
    }
    speculation = {"method": "mtp", "num_speculative_tokens": settings.k}
    llm = LLM(
        folder,
        speculative_config=speculation,
        max_num_seqs=settings.slots,
        max_num_batched_tokens=2 * CHUNK,
        **common,
    )
    return llm, LLM(folder, max_num_seqs=1, max_num_batched_tokens=CHUNK, **common)


def run_round(
    llm: LLM,
    alone: LLM,
    settings: argparse.Namespace,
    number: int,
    rate: float,
    tally: Tally,
) -> None:
    """Run one round on both engines, and add the comparison to the tally."""
    requests = make_requests(llm, settings, number)
    arrivals = make_arrivals(rate, len(requests), settings.seed + number)
    outputs, seconds = serve(llm.engine, requests, arrivals)
    expected, seconds_alone = serve(alone.engine, requests)
    tally.rounds += 1
    tally.found += compare_all(llm.engine, requests, expected, outputs)
    tally.shortest = min(tally.shortest, *map(len, outputs.values()))
    tally.num_tokens += sum(map(len, outputs.values()))
    tally.seconds += seconds
    tally.seconds_alone += seconds_alone


def make_requests(llm: LLM, settings: argparse.Namespace, number: int) -> list[Request]:
    """Return the requests of round `number`. Their order, seeds and lengths depend on the round."""
    rng = np.random.default_rng([settings.seed, number])
    prompts = make_prompts(llm, settings)
    first = number * settings.prompts
    requests = [
        llm.request_maker.make(
            prompt,
            SamplingParams(
                n=settings.samples,
                temperature=1.0,
                seed=(settings.seed * 1_000_003 + first + i) % 2**32,
                max_tokens=int(rng.integers(FEWEST_TOKENS, settings.max_tokens + 1)),
            ),
            first + i,
            f"prompt {i}",
        )
        for i, prompt in enumerate(prompts)
    ]
    return [requests[i] for i in rng.permutation(len(requests))]


def make_prompts(llm: LLM, settings: argparse.Namespace) -> list[list[int]]:
    """Return beginnings of questions, or random tokens for a model without a tokenizer.

    The first prompts have 1, 2, ... K + 2 tokens, about as many as a round. The other lengths are
    random, up to more than a chunk.
    """
    rng = np.random.default_rng(settings.seed)
    texts = tokenize(read_questions(), llm.tokenizer) if llm.tokenizer else []
    prompts = []
    for i in range(settings.prompts):
        length = i + 1 if i < settings.k + 2 else int(rng.integers(1, LONGEST_PROMPT + 1))
        tokens = rng.integers(0, llm.target.vocab_size, length).tolist()
        prompts.append(list(texts[i % len(texts)][:length]) if texts else tokens)
    return prompts


def make_arrivals(rate: float, most: int, seed: int) -> Iterator[int]:
    """Yield the number of requests that arrive before each step."""
    rng = np.random.default_rng(seed)
    while True:
        yield most if rate == math.inf else int(rng.poisson(rate))


def serve(
    engine: Engine, requests: Sequence[Request], arrivals: Iterator[int] | None = None
) -> tuple[Outputs, float]:
    """Run the requests; return their outputs and the seconds.

    `arrivals` yields the number of requests that arrive before each step. If it is None, all
    requests arrive at once.
    """
    arrivals = arrivals or itertools.repeat(len(requests))
    engine.prepare(requests)
    waiting = deque(requests)
    outputs: Outputs = {}
    start = time.perf_counter()
    while waiting or engine.has_work:
        for _ in range(min(next(arrivals), len(waiting))):
            engine.add(waiting.popleft())
        for sample in engine.step():
            if sample.is_finished:
                outputs[sample.request.request_id, sample.index] = sample.output
    return outputs, time.perf_counter() - start


def compare_all(
    engine: Engine, requests: Sequence[Request], expected: Outputs, outputs: Outputs
) -> Identity:
    """Compare the outputs of every sample of the requests."""
    pairs = [(request, index) for request in requests for index in range(len(request.seeds))]
    keys = [(request.request_id, index) for request, index in pairs]
    return compare(engine, pairs, [expected[key] for key in keys], [outputs[key] for key in keys])


def accepted_shares(metrics: Metrics) -> list[float]:
    """Return the fraction of rounds that accepted n drafts, for each n from 0 to K."""
    at_least = [metrics.num_drafts, *metrics.num_accepted_tokens_per_pos, 0]
    return [(a - b) / metrics.num_drafts for a, b in itertools.pairwise(at_least)]


def write(
    settings: argparse.Namespace,
    source: dict[str, Any],
    tallies: dict[str, Tally],
    shares: list[float],
) -> None:
    """Write a result with the comparisons so far."""
    total = sum((tally.found for tally in tallies.values()), Identity())
    mode = ", in exact mode" if settings.exact else ""
    model = "A random hybrid" if settings.model == "random" else Path(settings.model).name
    generations = {
        "title": f"{total.num_outputs} generations, {len(total.near_ties)} near-ties, "
        f"{len(total.mismatches)} mismatches",
        "columns": COLUMNS,
        "rows": [tally.row(name) for name, tally in tallies.items()],
        "notes": [
            f"Prompts of 1 to {LONGEST_PROMPT} tokens, at most {FEWEST_TOKENS} to "
            f"{settings.max_tokens} tokens of output; temperature 1; every round has its own "
            "order, seeds and lengths.",
            f"A near-tie is a difference where the two best scores lie within {NEAR_TIE:g}.",
        ],
    }
    accepted = {
        "title": "How many drafts a round of speculation accepted",
        "columns": ["accepted", "share of rounds"],
        "rows": [[count, share] for count, share in enumerate(shares)],
        "notes": [],
    }
    result = {
        "title": f"Accepted counts under stress{mode}",
        "description": f"{model} in float32, {settings.prompts} prompts with {settings.samples} "
        f"samples each, MTP with K = {settings.k} in {settings.slots} slots, asynchronous "
        f"scheduling, against an engine with one slot and no drafter{mode}.",
        "provenance": source,
        "settings": {
            name: value for name, value in vars(settings).items() if name not in ("model", "json")
        },
        "tables": [generations, accepted],
        "samples": {"near_ties": total.near_ties, "mismatches": total.mismatches},
    }
    write_result(settings.json, result)


def _text(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
