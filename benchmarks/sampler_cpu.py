"""Measures sampling and verification of tokens, as a fraction of the demo model's decode step.

python benchmarks/sampler_cpu.py
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import RESULTS, provenance, summary, write_result

from specjax import LLM, SamplingParams
from specjax.device.drafters.drafter import DraftContext, Variant
from specjax.device.edits import History
from specjax.device.inputs import AdmitInputs
from specjax.device.layout import Layout
from specjax.device.requests import Requests
from specjax.device.sampling import process
from specjax.device.verification import Draft, SeedExact, Target, Verdict
from specjax.engine.admissions import pack_admissions
from specjax.host.residency import Residency
from specjax.host.sequence import Sequence

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
K, MAX_LEN = 3, 512
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, logprobs 5": {"temperature": 0.8, "logprobs": 5},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "logit_bias, bad_words, min_tokens": {
        "temperature": 0.8, "logit_bias": {5: 1.0}, "bad_words": ["the"], "min_tokens": 4,
    },
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 50, top_p 0.95, min_p 0.02": {
        "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02,
    },
}  # fmt: skip
FREE = {"temperature": 0.8}
GRAMMAR = FREE | {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}}}


def main() -> None:
    """Time whole steps and the sampling of steps in turn, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    settings = parser.parse_args()
    source = provenance()
    llm = LLM(
        CHECKPOINTS / "demo-llama",
        speculative_config={
            "method": "eagle3",
            "model": str(CHECKPOINTS / "demo-llama-eagle3"),
            "num_speculative_tokens": K,
        },
        max_num_seqs=settings.batch_size,
        max_model_len=MAX_LEN,
        max_logprobs=5,
        compile_ahead=True,
    )
    step_times: dict[str, list[float]] = {name: [] for name in CASES}
    shares: dict[str, list[float]] = {name: [] for name in CASES}
    sampler_times: dict[str, list[float]] = {name: [] for name in CASES}
    samplers = {name: sampler(llm, case, settings.batch_size) for name, case in CASES.items()}
    batch_size = settings.batch_size
    grammar_times: dict[int, list[float]] = {count: [] for count in (0, 1, batch_size)}
    for _ in range(settings.rounds + 1):  # the first round warms up
        for count, times in grammar_times.items():
            times.append(
                decode_step_seconds(llm, [GRAMMAR] * count + [FREE] * (batch_size - count))
            )
        for name, case in CASES.items():
            step_times[name].append(decode_step_seconds(llm, [case] * batch_size))
            sampler_times[name].append(median_seconds(samplers[name]))
            shares[name].append(sampler_times[name][-1] / step_times[name][-1])
    rows = [
        [
            name,
            *([1e3 * x for x in summary(times[name][1:])] for times in (step_times, sampler_times)),
            [100 * x for x in summary(shares[name][1:])],
        ]
        for name in CASES
    ]
    table = {
        "title": f"Batch {settings.batch_size}, K = {K}",
        "columns": ["requests", "ms per step", "ms for sampling in it", "% of the step"],
        "rows": rows,
        "notes": [
            "A step of the engine is timed from launch to result. Sampling is timed as a separate "
            f"program on logits: {K} drafts are drawn, {K + 1} rows edited, truncated, drawn and "
            f"verified. {settings.rounds} rounds, each with all cases in turn."
        ],
    }
    base = np.array(grammar_times[0][1:])
    grammar_rows = [
        [
            count,
            [1e3 * x for x in summary(times[1:])],
            summary(np.array(times[1:]) / base),
        ]
        for count, times in grammar_times.items()
    ]
    grammars = {
        "title": f"Batch {batch_size} with structured outputs",
        "columns": ["requests with a JSON schema", "ms per step", "times a step without"],
        "rows": grammar_rows,
        "notes": [
            "Temperature 0.8. Ratios are of the same round. Host and device share the cores here: "
            "where they do not, masks are made while the target runs."
        ],
    }
    result = {
        "title": "The sampler's share of a step",
        "description": f"demo-llama with its EAGLE-3 head in float32, {llm.target.vocab_size} "
        "tokens in the vocabulary.",
        "provenance": source,
        "settings": vars(settings),
        "tables": [table, grammars],
        "samples": {
            "step_seconds": step_times,
            "sampler_seconds": sampler_times,
            "grammar_step_seconds": grammar_times,
        },
    }
    write_result(RESULTS / "sampler_cpu.json", result)
    for row in rows + grammar_rows:
        print(row[0], *(f"{cell[0]:.2f}" for cell in row[1:]))


def decode_step_seconds(llm: LLM, cases: list[dict[str, Any]]) -> float:
    """Return the median time of decode steps, in a short generation of all requests."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, llm.target.vocab_size, (len(cases), 8)).tolist()
    requests = []
    for i, case in enumerate(cases):
        params = SamplingParams(max_tokens=24, ignore_eos=True, seed=i, **case)
        requests.append(llm.request_maker.make(prompts[i], params, i, "prompt"))
    llm.engine.prepare(requests)
    for request in requests:
        llm.engine.add(request)
    times = []
    while llm.engine.has_work:
        start, before = time.perf_counter(), llm.engine.metrics()
        llm.engine.step()
        after = llm.engine.metrics()
        if after.num_drafts - before.num_drafts == len(cases):
            times.append(time.perf_counter() - start)
    return float(np.median(times))


def sampler(llm: LLM, case: dict[str, Any], batch_size: int) -> Callable[[], Any]:
    """Return a function that runs a step's sampling on random logits, as a separate program."""
    vocab_size = llm.target.vocab_size
    params = SamplingParams(ignore_eos=True, seed=0, **case)
    request = llm.request_maker.make([5, 6, 7], params, 0, "prompt")
    layout = Layout(batch_size, MAX_LEN, 1, vocab_size)
    sequences = [Sequence.of(request, 0, 0) for _ in range(batch_size)]
    for slot, sequence in enumerate(sequences):
        sequence.residency = Residency(slot=slot, num_to_prefill=3)
    packed = pack_admissions(sequences, batch_size, layout)
    requests = jax.device_put(layout.packing(AdmitInputs).views(packed).requests)
    history = History(
        jnp.zeros((batch_size, MAX_LEN), jnp.int32), jnp.full(batch_size, 40, jnp.int32)
    )
    keys = jax.random.split(jax.random.key(0))
    draft_logits = 3 * jax.random.normal(keys[0], (K, batch_size, vocab_size))
    logits = 3 * jax.random.normal(keys[1], (batch_size, K + 1, vocab_size))
    has_edits = jnp.array(params.edits_logits)
    arguments = draft_logits, logits, requests, history, has_edits
    run = jax.jit(sample_and_verify)
    return lambda: jax.block_until_ready(run(*arguments))


def sample_and_verify(
    draft_logits: jax.Array,
    logits: jax.Array,
    requests: Requests,
    history: History,
    has_edits: jax.Array,
) -> Verdict:
    """Draw drafts from `draft_logits` [K, B, V], and verify them by the `logits` [B, K + 1, V]."""
    batch = logits.shape[0]
    starts = history.lengths - 1
    rows = jnp.arange(batch)
    table, variant = rows[:, None], Variant()
    context = DraftContext(
        rows, starts, rows >= 0, table, requests, history, has_edits, "auto", 1, True, variant
    )
    drafts: list[jax.Array] = []
    for step in draft_logits:
        drafts.append(context.draw(step, None, step.shape[-1], drafts, is_greedy=False)[0])
    draft = Draft(jnp.stack(drafts, axis=1), None)
    full = jnp.full(batch, K)

    def verify(logits):
        return SeedExact().verify(draft, Target(logits, requests.sampling, history.lengths, full))

    def verify_edited(logits):
        return verify(process(logits, requests, history.then(draft.tokens)))

    return jax.lax.cond(has_edits, verify_edited, verify, logits)


def median_seconds(run: Callable[[], Any], count: int = 20) -> float:
    """Return the median time of a call of `run`, in seconds."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


if __name__ == "__main__":
    main()
