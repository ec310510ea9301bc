"""Measures effects of fewer bits on the demo model: perplexity, outputs, acceptance, speed.

    python benchmarks/quantised_cpu.py DATA

DATA is a .jsonl file of the test questions of GSM8K with their answers.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from report import RESULTS, provenance, summary, write_result

from specjax import LLM, SamplingParams
from specjax.bench.workload import read_questions
from specjax.checkpoint.demo import TARGET
from specjax.engine.metrics import Metrics

NUM_TEXTS, NUM_PROMPTS, NUM_TOKENS, K, ROUNDS = 32, 24, 48, 3, 5
SIZES: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "decode_batches": (8,),
    "prefill_shapes": ((2, 256),),
    "compile_ahead": True,
    "verbose": False,
}
ALSO_ALONE = SIZES | {"decode_batches": (1, 8)}  # a single request runs without padding
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{f"weights {one}": {"quantization": one} for one in ("fp8", "int8", "int4")},
    **{f"KV cache {one}": {"kv_cache_dtype": one} for one in ("fp8", "int8")},
}
# Targets and drafters, and whose output head the drafts come from.
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE-1, the target's head": (TARGET, {"model": "demo-llama-eagle1"}),
    "EAGLE-3, its own head": (TARGET, {"model": "demo-llama-eagle3"}),
    "MTP, the target's head": ("demo-qwen3.5", {"method": "mtp"}),
}
NARROW: dict[str, dict[str, str]] = {
    "plain": {},
    "head fp8": {"head_dtype": "fp8"},
    "head int8": {"head_dtype": "int8"},
    "head and layers int8": {"head_dtype": "int8", "quantization": "int8"},
    "head fp8, layers int4": {"head_dtype": "fp8", "quantization": "int4"},
}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    rows = [json.loads(line) for line in parser.parse_args().data.read_text().splitlines()]
    texts = [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows[:NUM_TEXTS]]
    source = provenance()
    scored = two_at_a_time(partial(quality, texts), [*FORMATS.values()])
    llms = dict(zip(FORMATS, (llm for llm, _ in scored), strict=True))
    qualities = dict(zip(FORMATS, (found for _, found in scored), strict=True))
    speeds = speeds_of(llms)
    acceptances = acceptance()
    result = {
        "title": "Fewer bits on the demo models",
        "description": f"{TARGET} in float32 on a CPU, which dequantises weights in every product: "
        f"{NUM_TEXTS} test questions of GSM8K with answers, {qualities['plain'][1]} tokens, and "
        f"{NUM_PROMPTS} greedy outputs of {NUM_TOKENS} tokens.",
        "provenance": source,
        "settings": {name: str(value) for name, value in ALSO_ALONE.items()},
        "tables": [quality_table(qualities, speeds), acceptance_table(acceptances)],
        "samples": {"speeds": speeds, "perplexities": {n: q[0] for n, q in qualities.items()}},
    }
    write_result(RESULTS / "quantised_cpu.json", result)


def prompts_of(llm: LLM) -> list[Any]:
    """Return the shipped questions as chats."""
    return [[{"role": "user", "content": question}] for question in read_questions()[:NUM_PROMPTS]]


def quality(
    texts: Sequence[str], options: dict[str, Any]
) -> tuple[LLM, tuple[float, int, list[list[int]]]]:
    """Return an LLM with `options`, and the figures of its quality.

    The figures are the perplexity of `texts`, their number of tokens, and greedy outputs.
    """
    llm = LLM(TARGET, **ALSO_ALONE, **options)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    scored = llm.generate(list(texts), params, use_tqdm=False)
    entries = [entry for one in scored for entry in one.prompt_logprobs or [] if entry]
    nats = [-next(iter(entry.values())).logprob for entry in entries]
    outputs = llm.chat(prompts_of(llm), GREEDY, use_tqdm=False)
    tokens = [list(one.outputs[0].token_ids) for one in outputs]
    return llm, (math.exp(sum(nats) / len(nats)), len(nats), tokens)


def speeds_of(llms: dict[str, LLM]) -> dict[str, list[float]]:
    """Return tokens per second of a single request, for each LLM in each of the rounds."""
    found: dict[str, list[float]] = {name: [] for name in llms}
    for _ in range(ROUNDS):
        for name, llm in llms.items():
            stream = iter(llm.generate_stream(["Question: "], GREEDY))
            next(stream)
            start = time.perf_counter()
            num_tokens = sum(1 for _ in stream)
            found[name].append(num_tokens / (time.perf_counter() - start))
    for llm in llms.values():
        llm.close()
    return found


def acceptance() -> list[list[Any]]:
    """Return a row per drafter and format: names, tokens per step, acceptance, equal outputs."""
    cases = [(name, narrow) for name in DRAFTERS for narrow in NARROW]
    found = dict(zip(cases, two_at_a_time(drafts, cases), strict=True))
    rows = []
    for (name, narrow), (tokens, metrics) in found.items():
        rate = metrics.num_accepted_tokens / metrics.num_draft_tokens
        expected, _ = found[name, "plain"]
        num_equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
        rows.append(
            [
                name,
                narrow,
                f"{metrics.mean_acceptance_length:.3f}",
                f"{100 * rate:.1f}%",
                f"{num_equal} of {len(tokens)}",
            ]
        )
    return rows


def drafts(case: tuple[str, str]) -> tuple[list[list[int]], Metrics]:
    """Return the greedy outputs and the metrics of a drafter in a format (keys of the tables)."""
    (target, drafter), own = DRAFTERS[case[0]], NARROW[case[1]]
    config = {**drafter, "num_speculative_tokens": K, **own}
    with LLM(target, speculative_config=config, **SIZES) as llm:
        outputs = llm.chat(prompts_of(llm), GREEDY, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs], llm.metrics()


def two_at_a_time(function: Callable[[Any], Any], cases: Sequence[Any]) -> list[Any]:
    """Return the function's results. Two cases run at a time, as one leaves processors idle."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, cases))


def quality_table(qualities: dict[str, Any], speeds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the table of formats."""
    plain = qualities["plain"][2]
    rows = []
    for name, (perplexity, _, outputs) in qualities.items():
        pairs = list(zip(plain, outputs, strict=True))
        before = sum(
            next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), NUM_TOKENS)
            for pair in pairs
        )
        ratios = [a / b for a, b in zip(speeds[name], speeds["plain"], strict=True)]
        rows.append(
            [
                name,
                f"{perplexity:.3f}",
                f"{sum(a == b for a, b in pairs)} of {len(pairs)}",
                f"{100 * before / (NUM_TOKENS * len(pairs)):.0f}%",
                summary(speeds[name]),
                summary(ratios),
            ]
        )
    return {
        "title": "Formats of weights and caches",
        "columns": [
            "format", "perplexity", "greedy outputs that stay", "tokens before a difference",
            "tokens/s, one request", "times plain",
        ],
        "rows": rows,
        "notes": [
            f"Speeds are of decoding alone, {ROUNDS} rounds with all formats in turn; ratios are "
            "paired within a round.",
        ],
    }  # fmt: skip


def acceptance_table(rows: list[list[Any]]) -> dict[str, Any]:
    """Return the table of drafters."""
    return {
        "title": f"Drafters with fewer bits, K = {K}, greedy",
        "columns": ["drafter", "weights", "tokens/step", "accepted drafts", "outputs of plain"],
        "rows": rows,
        "notes": ["Outputs cannot change: the target's own head and layers verify every draft."],
    }


if __name__ == "__main__":
    main()
