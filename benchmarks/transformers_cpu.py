r"""Compares specjax with Hugging Face transformers, on the same CPU, checkpoint and prompts.

    python benchmarks/transformers_cpu.py --model checkpoints/demo-llama \
        --drafter checkpoints/demo-llama-eagle3 --k 3

The systems take turns in one process, never at the same time, with the same cores, in f32. There
are two comparisons:

- One prompt at a time, greedily.
- Many prompts of mixed lengths, with mixed output lengths. Transformers runs left-padded batches,
  until the longest output of each batch is complete. specjax uses continuous batching. Only
  requested tokens count.

The end of sequence is ignored, so that every system generates the same number of tokens.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from report import RESULTS, provenance, summary, write_result

from specjax import LLM, SamplingParams
from specjax.bench.environment import num_cpus
from specjax.bench.workload import read_questions, tokenize

HF, PLAIN = "transformers", "specjax"
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class System:
    """A system that is compared.

    `generate(prompts, num_tokens)` greedily generates exactly `num_tokens[i]` tokens for prompt i.
    """

    name: str
    generate: Callable[[Prompts, Sequence[int]], list[list[int]]]


@dataclass(frozen=True)
class Run:
    """The result of a system on one load."""

    seconds: float
    outputs: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        """The requested tokens per second."""
        return sum(map(len, self.outputs)) / self.seconds


def transformers_system(folder: str, batch_size: int) -> System:
    """Return the system of transformers' default `generate`, on batches of prompts in order."""
    torch.set_num_threads(num_cpus())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def generate_batch(prompts: Prompts, num_tokens: Sequence[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(num_tokens),
                pad_token_id=0,
            )
        rows = out[:, width:].tolist()
        return [row[:count] for row, count in zip(rows, num_tokens, strict=True)]

    def generate(prompts: Prompts, num_tokens: Sequence[int]) -> list[list[int]]:
        outputs = []
        for i in range(0, len(prompts), batch_size):
            part = slice(i, i + batch_size)
            outputs += generate_batch(prompts[part], num_tokens[part])
        return outputs

    return System(HF, generate)


def specjax_system(name: str, llm: LLM) -> System:
    """Return the system of `LLM.generate`, which gets all prompts at once."""

    def generate(prompts: Prompts, num_tokens: Sequence[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in num_tokens
        ]
        outputs = llm.generate([list(p) for p in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    return System(name, generate)


def take_turns(
    systems: Sequence[System], loads: Sequence[tuple[Prompts, Sequence[int]]], rounds: int
) -> list[dict[str, Run]]:
    """Run every load on every system, `rounds` times. The order of the systems rotates."""
    for system in systems:  # warm up
        system.generate(*loads[0])
    turns = []
    for turn, load in enumerate(list(loads) * rounds):
        runs = {}
        for i in range(len(systems)):
            system = systems[(turn + i) % len(systems)]
            time.sleep(0.05)  # until the previous system's threads are idle
            start = time.perf_counter()
            outputs = system.generate(*load)
            runs[system.name] = Run(time.perf_counter() - start, outputs)
            if [len(o) for o in outputs] != list(load[1]):
                raise RuntimeError(f"{system.name} generated another number of tokens than asked")
        turns.append(runs)
    return turns


def table(title: str, turns: Sequence[dict[str, Run]], notes: list[str]) -> dict[str, Any]:
    """Return a table of each system's speed, and of ratios to other systems in the same turn."""
    names = list(turns[0])
    names = sorted(names, key=[HF, PLAIN, *names].index)

    def ratio(name: str, base: str) -> list[float]:
        return summary([runs[base].seconds / runs[name].seconds for runs in turns])

    rows = []
    for name in names:
        speed = summary([runs[name].tokens_per_second for runs in turns])
        same = [
            mine == theirs
            for runs in turns
            for mine, theirs in zip(runs[name].outputs, runs[HF].outputs, strict=True)
        ]
        share = f"{100 * np.mean(same):.0f} %"
        rows.append([name, speed, ratio(name, HF), ratio(name, PLAIN), share])
    columns = ["system", "tokens/s", f"times {HF}", f"times {PLAIN}", f"outputs as {HF}"]
    return {"title": title, "columns": columns, "rows": rows, "notes": notes}


def mixed_load(
    questions: Sequence[str], tokenizer: Any, args: argparse.Namespace
) -> tuple[Prompts, list[int]]:
    """Return prompts that have one to three questions each, and lognormal output lengths."""
    rng = np.random.default_rng(args.seed)
    texts = []
    for i in range(args.num_prompts):
        chosen = [questions[(i + j) % len(questions)] for j in range(rng.integers(1, 4))]
        texts.append("\n\n".join(chosen))
    lengths = np.exp(rng.normal(np.log(args.median_tokens), args.sigma, args.num_prompts))
    num_tokens = np.clip(np.rint(lengths), 8, args.most_tokens).astype(int).tolist()
    room = args.max_model_len - args.most_tokens
    return [p[:room] for p in tokenize(texts, tokenizer)], num_tokens


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="specjax against transformers on this CPU")
    parser.add_argument("--model", default="checkpoints/demo-llama")
    parser.add_argument("--drafter", default="checkpoints/demo-llama-eagle3")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--prompts", type=Path, help='lines of {"question": ...}')
    parser.add_argument("--num-single", type=int, default=8, help="prompts at batch 1")
    parser.add_argument("--single-tokens", type=int, default=128)
    parser.add_argument("--single-rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=64, help="prompts of the mixed load")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--median-tokens", type=int, default=64)
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--most-tokens", type=int, default=256)
    parser.add_argument("--mixed-rounds", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "transformers_cpu.json")
    return parser.parse_args()


def main() -> None:
    """Run both comparisons and write the result."""
    args = parse_arguments()
    source = provenance(["torch", "transformers"])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sizes = {
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.batch_size,
        "compile_ahead": True,
    }
    plain = LLM(args.model, **sizes)
    speculation = {
        "method": args.method,
        "model": args.drafter,
        "num_speculative_tokens": args.k,
    }
    speculative = LLM(args.model, speculative_config=speculation, **sizes)
    systems = [
        transformers_system(args.model, args.batch_size),
        specjax_system(PLAIN, plain),
        specjax_system(f"specjax, {args.method} K={args.k}", speculative),
    ]
    lines = args.prompts.read_text("utf-8").splitlines() if args.prompts else None
    questions = [json.loads(line)["question"] for line in lines] if lines else read_questions()
    if plain.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer, which the prompts need")

    single = [([p], [args.single_tokens]) for p in tokenize(questions, plain.tokenizer)]
    before = speculative.metrics()
    turns = take_turns(systems, single[: args.num_single], args.single_rounds)
    after = speculative.metrics()
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    length = 1 + accepted / (after.num_drafts - before.num_drafts)
    tables = [
        table(
            "One prompt at a time",
            turns,
            [
                f"{args.num_single} prompts x {args.single_rounds} rounds, "
                f"{args.single_tokens} tokens each, prompt included in the time. "
                f"Mean acceptance length {length:.2f}, tokens past the end of a text included. "
                "Ratios are paired: the same prompt in the same round."
            ],
        )
    ]
    samples = {"single": timings(turns)}

    prompts, num_tokens = load = mixed_load(questions, plain.tokenizer, args)
    turns = take_turns(systems, [load], args.mixed_rounds)
    batches = [num_tokens[i : i + args.batch_size] for i in range(0, len(prompts), args.batch_size)]
    padded = sum(len(batch) * max(batch) for batch in batches)
    tables.append(
        table(
            f"{len(prompts)} prompts of mixed lengths",
            turns,
            [
                f"Prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens; outputs "
                f"lognormal with median {args.median_tokens} and sigma {args.sigma}, clipped to "
                f"8..{args.most_tokens}, seed {args.seed}: {sum(num_tokens)} tokens in all. "
                f"transformers takes the prompts in order in batches of {args.batch_size}, which "
                f"generate {padded} tokens to give those; specjax runs up to {args.batch_size} at "
                f"a time. {args.mixed_rounds} rounds; ratios are paired by round."
            ],
        )
    )
    samples["mixed"] = timings(turns)
    result = {
        "title": "Against transformers on a CPU",
        "description": "Greedy generation in f32 on all cores, end of sequence ignored. "
        "transformers is `generate` as it comes: eager PyTorch, its default cache and attention.",
        "provenance": source,
        "settings": {k: v for k, v in vars(args).items() if k not in ("output", "prompts")},
        "tables": tables,
        "samples": samples,
    }
    for name in "model", "drafter":
        result["settings"][name] = Path(result["settings"][name]).name
    write_result(args.output, result)
    for each in tables:
        print(each["title"], *each["rows"], sep="\n  ")


def timings(turns: Sequence[dict[str, Run]]) -> dict[str, list[float]]:
    """Return the seconds of every turn, by system."""
    return {name: [round(runs[name].seconds, 4) for runs in turns] for name in turns[0]}


if __name__ == "__main__":
    main()
