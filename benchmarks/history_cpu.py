"""Times the rollouts of GRPO with and without drafts from earlier rollouts.

    python benchmarks/history_cpu.py

The demo is trained to use many different tokens. After each update, three engines with equal
weights and seeds generate rollouts of the same prompts: without speculation, with adaptive EAGLE-3,
and with adaptive EAGLE-3 and a history. So the rollouts must be equal. The engine with a history
also generates other rollouts, half of which reuse the noise of earlier rollouts. The times do not
include training.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from report import FOLDER, RESULTS, provenance, summary, write_result

sys.path.append(str(FOLDER.parent / "examples"))

import grpo  # noqa: E402

from specjax import SamplingParams  # noqa: E402
from specjax.bench.workload import read_questions  # noqa: E402
from specjax.checkpoint.demo import DRAFTERS, TARGET, demo_folder  # noqa: E402
from specjax.engine.metrics import Metrics  # noqa: E402
from specjax.rl import RolloutBatch, RolloutEngine, RolloutHistory  # noqa: E402

NEITHER, ADAPTIVE, HISTORY = "no speculation", "adaptive EAGLE-3", "with a history"
REUSED = "with half of the noise reused"
NUM_SAMPLES, MAX_TOKENS, PROMPT_LENGTH = 4, 64, 96
SOURCES = "eagle3", "suffix", "history", "replay"


def main() -> None:
    """Train, measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=1e-5, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: %(default)s")
    settings = parser.parse_args()
    source = provenance(["optax"])
    drafter = {"method": "eagle3", "model": str(demo_folder(DRAFTERS[TARGET]["eagle3"]))}
    adaptive = drafter | {"adaptive": True, "num_speculative_tokens": 3}
    configs = {NEITHER: None, ADAPTIVE: adaptive, HISTORY: adaptive | {"with": ["suffix"]}}
    names = [*configs, REUSED]
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(open_engine(config)) for name, config in configs.items()
        }
        rows, num_differing = train(engines, settings)
    later = [row[1:5] for row in rows[1:]]  # the first update has no history
    ratios = [summary([seconds[0] / seconds[i] for seconds in later]) for i in range(4)]
    table = {
        "title": f"Rollouts of {settings.prompts} prompts with {NUM_SAMPLES} samples, by update",
        "columns": [
            "update", *(f"{name}, s" for name in names), "acceptance length without a history",
            "with it", "with reused noise", *(f"{name}: drafts" for name in SOURCES),
            *(f"{name}: accepted" for name in SOURCES),
        ],
        "rows": rows,
        "notes": [
            f"Up to {MAX_TOKENS} tokens at temperature {settings.temperature:g}. Of "
            f"{settings.updates * settings.prompts * NUM_SAMPLES} rollouts, {num_differing} differ "
            "between the first three columns. Drafts and accepted drafts are of the last two."
        ],
    }  # fmt: skip
    speeds = {
        "title": "Speed of rollouts, from the second update on",
        "columns": [f"{name} x {NEITHER}" for name in names],
        "rows": [ratios],
        "notes": [],
    }
    for one in table, speeds:
        for row in [one["columns"], *one["rows"]]:
            print(*(f"{x:.2f}" if isinstance(x, float) else x for x in row), sep="\t", flush=True)
    result = {
        "title": "Drafts from earlier rollouts on a CPU",
        "description": "GRPO on demo-llama, with its EAGLE-3 head; the reward is the fraction of "
        "different tokens in a rollout.",
        "provenance": source,
        "settings": vars(settings),
        "tables": [speeds, table],
    }
    write_result(RESULTS / "history_cpu.json", result)


def open_engine(config: Mapping[str, Any] | None) -> RolloutEngine:
    """Open an engine whose programs are compiled."""
    return RolloutEngine(
        demo_folder(TARGET),
        speculative_config=config,
        max_model_len=PROMPT_LENGTH + MAX_TOKENS,
        max_num_seqs=16,
        decode_batches=(4, 16),  # as by default, few requests take a smaller step
        prefill_shapes=((4, PROMPT_LENGTH),),
        max_num_batched_tokens=4 * PROMPT_LENGTH,
        dtype="float32",
        compile_ahead=True,
    )


def train(
    engines: Mapping[str, RolloutEngine], settings: argparse.Namespace
) -> tuple[list[list[Any]], int]:
    """Train by GRPO.

    Return the rows of the table, and the number of rollouts that differ between the engines.
    """
    policy = engines[NEITHER]
    optimizer = grpo.make_optimizer(settings.rate)
    update = grpo.make_update(policy.target, optimizer, grpo.grpo_loss)
    learner = grpo.begin(policy.params.target, optimizer)
    histories = {HISTORY: RolloutHistory(), REUSED: RolloutHistory()}
    names, engine_of = [*engines, REUSED], {**engines, REUSED: engines[HISTORY]}
    prompts = read_questions()[: settings.prompts]
    rows: list[list[Any]] = []
    num_differing = 0
    for number in range(settings.updates):
        params = SamplingParams(
            n=NUM_SAMPLES, temperature=settings.temperature, max_tokens=MAX_TOKENS, seed=number
        )
        seconds, batches, counts = {}, {}, {}
        for name in [*names[number % 4 :], *names[: number % 4]]:
            engine, own = engine_of[name], histories.get(name)
            before, start = engine.metrics(), time.perf_counter()
            reuse = 0.5 * (name == REUSED)
            batches[name] = engine.generate(prompts, params, history=own, reuse_noise=reuse)
            seconds[name] = time.perf_counter() - start
            counts[name] = before, engine.metrics()
        outputs = [[one.token_ids.tolist() for one in batches[name]] for name in engines]
        num_differing += sum(len({str(x) for x in same}) > 1 for same in zip(*outputs, strict=True))
        lengths = [acceptance_length(*counts[name]) for name in (ADAPTIVE, HISTORY, REUSED)]
        drafts, accepted = (
            np.add(*(by_source(*counts[name], of) for name in histories)).tolist()
            for of in ("draft", "accepted")
        )
        rows.append([number, *(seconds[name] for name in names), *lengths, *drafts, *accepted])
        print(*rows[-1], sep="\t", flush=True)
        padded = batches[NEITHER].padded(0, prompt_length=PROMPT_LENGTH, length=MAX_TOKENS)
        judged = rewards(batches[NEITHER], settings.prompts)
        advantages = grpo.advantages(judged).reshape(-1)
        learner, _ = update(learner, grpo.training_rows(padded, advantages))
        for engine in engines.values():
            engine.update_weights(learner.params)
    return rows, num_differing


def rewards(batch: RolloutBatch, num_prompts: int) -> np.ndarray:
    """Return rewards f32[prompts, samples].

    The reward is the number of distinct tokens of a rollout, divided by the number of all tokens.
    """
    fractions = [len(set(one.token_ids.tolist())) / len(one.token_ids) for one in batch]
    return np.array(fractions, np.float32).reshape(num_prompts, -1)


def acceptance_length(before: Metrics, after: Metrics) -> float:
    """Return the mean number of tokens that a request gains in a round with drafts."""
    num_rounds = after.num_drafts - before.num_drafts
    return 1 + (after.num_accepted_tokens - before.num_accepted_tokens) / max(1, num_rounds)


def by_source(before: Metrics, after: Metrics, which: str) -> list[int]:
    """Return the number of tokens of each source; `which` is "draft" or "accepted"."""
    old, new = (getattr(one, f"{which}_tokens_per_source") for one in (before, after))
    return [new.get(name, 0) - old.get(name, 0) for name in SOURCES]


if __name__ == "__main__":
    main()
