"""Compares adaptive K with no speculation and with static K, in rollouts with a long tail.

    python benchmarks/rollouts_cpu.py
    python benchmarks/rollouts_cpu.py --max-num-seqs 16 --repeats 5 --num-prompts 24

64 prompts are continued 8 times each. All samples start at once, and their lengths are drawn from a
lognormal distribution. So a few samples are much longer than the rest, and at the end few requests
run at a time. Every policy has a separate engine, as in training. Before every run, the engine's
weights are updated to the same values. This clears caches, and adaptive K no longer trusts its
measurements. The policies take turns.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from report import RESULTS, provenance, summary, write_result

from specjax import SamplingParams
from specjax.bench.workload import read_questions, tokenize
from specjax.checkpoint.demo import DRAFTERS, TARGET, demo_folder
from specjax.checks import check_positive
from specjax.rl import RolloutEngine, RolloutHistory

OFF, STATIC, ADAPTIVE = "no speculation", "K=3", "adaptive K"
HISTORY = "adaptive K, history"  # drafts also from the rollouts of earlier repeats
BLOCK = "adaptive K, block verification"  # draws other tokens, from the same distribution
POLICIES = STATIC, ADAPTIVE, HISTORY, BLOCK
NUM_SAMPLES = 8
MEDIAN, SIGMA, SHORTEST, LONGEST = 48, 0.8, 4, 256
MAX_MODEL_LEN, PAGE_SIZE = 448, 16
NUM_PREFILLED = 256  # tokens of a prefill step, if there are few programs
TAIL = 0.25  # the tail begins when fewer requests than this fraction of max_num_seqs run
WARM_UP = 128  # number of samples to warm up


@dataclass(frozen=True)
class Run:
    """One rollout of all samples.

    Attributes:
        outputs: the tokens of each sample.
        ends: 0, followed by the seconds from the start to the end of each sample, ascending.
        rounds: for each of `ends`, the number of rounds until then, by K.
        acceptance: the mean number of tokens per round of a request.
    """

    outputs: dict[int, list[int]]
    ends: list[float]
    rounds: list[Counter[int]]
    acceptance: float

    @property
    def makespan(self) -> float:
        """The seconds until the last sample ended."""
        return self.ends[-1]

    def when(self, num_unfinished: int) -> float:
        """Return the seconds until only `num_unfinished` samples were left."""
        return self.ends[-1 - num_unfinished]

    def rounds_between(self, more: int, fewer: int) -> Counter[int]:
        """Return the rounds by K while the unfinished samples fell from `more` to `fewer`."""
        return self.rounds[-1 - fewer] - self.rounds[-1 - more]


def main() -> None:
    """Measure, print the tables, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--max-num-seqs", type=int, nargs="+", default=[16, 64], help="default: %(default)s"
    )
    parser.add_argument("--num-prompts", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--decode-batches", type=int, nargs="+", help="default: powers of two")
    parser.add_argument("--max-k", type=int, default=5, help="of adaptive K; default: %(default)s")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--result", default="rollouts_cpu", help="file; default: %(default)s")
    settings = parser.parse_args()
    check_positive(**{"--repeats": settings.repeats, "--num-prompts": settings.num_prompts})
    source = provenance()
    lengths = draw_lengths(settings.num_prompts * NUM_SAMPLES)
    tables = []
    for max_num_seqs in settings.max_num_seqs:
        with open_engines(max_num_seqs, settings) as engines:
            runs = measure(engines, lengths, settings)
        tables += tabulate(runs, max_num_seqs, lengths, settings)
    for table in tables:
        print(f"\n{table['title']}")
        for row in [table["columns"], *table["rows"]]:
            print(*row, sep="\t")
        print(*table["notes"], flush=True)
    result = {
        "title": "Rollouts with a long tail on a CPU",
        "description": "demo-llama with its EAGLE-3 drafter in a RolloutEngine: the time of "
        f"prompts with {NUM_SAMPLES} samples each, of lognormal length.",
        "provenance": source,
        "settings": vars(settings),
        "tables": tables,
    }
    write_result(RESULTS / f"{settings.result}.json", result)


def draw_lengths(count: int) -> list[int]:
    """Return the number of tokens of each sample. It is the same in every run."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, count)
    return np.clip(drawn, SHORTEST, LONGEST).astype(int).tolist()


@contextmanager
def open_engines(
    max_num_seqs: int, settings: argparse.Namespace
) -> Iterator[dict[str, RolloutEngine]]:
    """Open one engine per policy."""
    drafter = {"method": "eagle3", "model": str(demo_folder(DRAFTERS[TARGET]["eagle3"]))}
    adaptive = drafter | {"adaptive": True, "num_speculative_tokens": settings.max_k}
    every = {
        STATIC: drafter | {"num_speculative_tokens": 3},
        ADAPTIVE: adaptive,
        HISTORY: adaptive | {"with": ["suffix"]},
        BLOCK: adaptive | {"verification": "block"},
    }
    policies = {OFF: None, **{name: every[name] for name in settings.policies}}
    sizes: dict[str, Any] = {}
    if settings.decode_batches is not None:  # few programs, which are compiled sooner
        sizes["decode_batches"] = tuple(settings.decode_batches)
        # One for new prompts. One for further samples, which share all pages but the last.
        shapes = (4, NUM_PREFILLED // 4), (NUM_PREFILLED // PAGE_SIZE, PAGE_SIZE)
        sizes["prefill_shapes"] = shapes
        sizes["max_num_batched_tokens"] = NUM_PREFILLED
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                RolloutEngine(
                    demo_folder(TARGET),
                    speculative_config=config,
                    max_model_len=MAX_MODEL_LEN,
                    max_num_seqs=max_num_seqs,
                    page_size=PAGE_SIZE,
                    num_pages=max_num_seqs * MAX_MODEL_LEN // PAGE_SIZE,
                    compile_ahead=True,
                    **sizes,
                )
            )
            for name, config in policies.items()
        }


def measure(
    engines: dict[str, RolloutEngine], lengths: Sequence[int], settings: argparse.Namespace
) -> dict[str, list[Run]]:
    """Run every policy once per repeat, and return the runs. The order of policies rotates."""
    tokenizer = engines[OFF].tokenizer
    assert tokenizer is not None
    questions = read_questions()
    asked = [f"{i} {questions[i % len(questions)]}" for i in range(settings.num_prompts)]
    prompts = [
        {"prompt_token_ids": list(tokens)}
        for tokens in tokenize(asked, tokenizer)
        for _ in range(NUM_SAMPLES)
    ]

    def params(repeat: int) -> list[SamplingParams]:
        first = repeat * len(lengths)
        return [
            SamplingParams(
                temperature=settings.temperature,
                seed=first + i,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
            )
            for i, length in enumerate(lengths)
        ]

    names, histories = list(engines), {HISTORY: RolloutHistory()}
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for name, engine in engines.items():  # untimed: touches memory, and adaptive K learns rates
        last = params(settings.repeats)[:WARM_UP]
        roll_out(engine, prompts[:WARM_UP], last, histories.get(name))
    for repeat in range(settings.repeats):
        first = repeat % len(names)
        for name in [*names[first:], *names[:first]]:
            run = roll_out(engines[name], prompts, params(repeat), histories.get(name))
            runs[name].append(run)
            print(f"{name}: {runs[name][-1].makespan:.1f} s", flush=True)
    return runs


def roll_out(
    engine: RolloutEngine,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    history: RolloutHistory | None,
) -> Run:
    """Generate all samples, and return the run."""
    outputs, ends, rounds = {}, [0.0], [Counter()]
    engine.update_weights(engine.params.target)
    before, start = engine.metrics(), time.perf_counter()
    for rollout in engine.stream(prompts, params, history=history):
        ends.append(time.perf_counter() - start)
        rounds.append(Counter(engine.metrics().k_histogram) - Counter(before.k_histogram))
        outputs[rollout.prompt_index] = rollout.token_ids.tolist()
    after = engine.metrics()
    # A sample's first token comes from prefill, not from a round.
    num_tokens = sum(map(len, outputs.values())) - len(outputs)
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return Run(outputs, ends, rounds, num_tokens / (num_tokens - num_accepted))


def tabulate(
    runs: dict[str, list[Run]],
    max_num_seqs: int,
    lengths: Sequence[int],
    settings: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return two tables: makespans by policy, and adaptive K's choices by samples left."""
    num_tail, (_, second, *_) = int(TAIL * max_num_seqs), runs
    adaptive = next((name for name in (ADAPTIVE, HISTORY) if name in runs), second)
    spans = {name: [run.makespan for run in mine] for name, mine in runs.items()}
    tails = {
        name: [run.makespan - run.when(num_tail - 1) for run in mine] for name, mine in runs.items()
    }

    def times(seconds: dict[str, list[float]], name: str, other: str) -> list[float]:
        return summary([b / a for a, b in zip(seconds[name], seconds[other], strict=True)])

    rows = [
        [
            name,
            summary(spans[name]),
            times(spans, name, OFF),
            times(spans, name, second),
            summary([part / whole for part, whole in zip(tails[name], spans[name], strict=True)]),
            times(tails, name, OFF),
            float(np.mean([run.acceptance for run in mine])),
        ]
        for name, mine in runs.items()
    ]
    pairs = [
        (output, plain.outputs[i])
        for name in (STATIC, ADAPTIVE, HISTORY)
        if name in runs
        for run, plain in zip(runs[name], runs[OFF], strict=True)
        for i, output in run.outputs.items()
    ]
    num_differing = sum(output != plain for output, plain in pairs)
    return [
        {
            "title": f"Makespan, max_num_seqs={max_num_seqs}",
            "columns": [
                "policy", "makespan, s", f"x {OFF}", f"x {second}", "tail's share",
                f"tail x {OFF}", "acceptance length",
            ],
            "rows": rows,
            "notes": [
                f"{len(lengths)} samples at temperature {settings.temperature:g}, max_tokens drawn "
                f"once from a lognormal distribution (median {MEDIAN}, sigma {SIGMA}, cut at "
                f"{SHORTEST} and {LONGEST}; ignore_eos): median {np.median(lengths):.0f}, mean "
                f"{np.mean(lengths):.0f}, longest {max(lengths)}, {sum(lengths)} in all. The "
                f"{settings.num_prompts} prompts are the package's 24 questions, numbered; they "
                "are included in the time, and the samples of a prompt share its pages. "
                f"{settings.repeats} repeats in turn, each with its own seeds; ratios compare "
                f"runs of the same repeat. The tail is the time when fewer than {num_tail} samples "
                f"are left. Of {len(pairs)} samples with drafts, {num_differing} differ from those "
                "without (not counted: block verification, which draws other tokens)."
            ],
        },
        {
            "title": f"What {adaptive} chose, max_num_seqs={max_num_seqs}",
            "columns": ["samples left", "part of the time", "rounds", "mean K"],
            "rows": list(stretches(runs[adaptive], len(lengths), max_num_seqs)),
            "notes": ["All repeats together."],
        },
    ]  # fmt: skip


def stretches(runs: Sequence[Run], count: int, max_num_seqs: int) -> Iterator[list[Any]]:
    """Yield the rows of adaptive K's table: fraction of the time, rounds and mean K.

    The first row is for the time in which the engine is full. Each further row ends when half as
    many samples are left as at its start.
    """
    marks = [count, max_num_seqs]
    while marks[-1] > 1:
        marks.append(marks[-1] // 2)
    total = sum(run.makespan for run in runs)
    for more, fewer in pairwise([*marks, 0]):
        seconds = sum(run.when(fewer) - run.when(more) for run in runs)
        ks: Counter[int] = Counter()
        for run in runs:
            ks += run.rounds_between(more, fewer)
        mean = sum(k * n for k, n in ks.items()) / max(1, ks.total())
        name = f"over {fewer}" if more == count else f"{more} to {fewer + 1}"
        yield [name, seconds / total, ks.total(), mean]


if __name__ == "__main__":
    main()
