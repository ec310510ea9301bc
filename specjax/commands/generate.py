"""`specjax generate`: complete prompts from the command line or a file, and print the outputs."""

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from specjax.commands.arguments import read_object, read_speculation
from specjax.llm import LLM, Prompt
from specjax.outputs import RequestOutput
from specjax.sampling_params import SamplingParams
from specjax.serving.defaults import device_defaults

_ROW_KEYS = ("prompt", "question", "prompt_token_ids")


def run(args: argparse.Namespace) -> int:
    """Run `specjax generate`."""
    prompts = read_prompts(args.prompts, args.prompts_file)
    params = read_sampling_params(args)
    # With few prompts, a smaller maximum keeps the steps small.
    usual = device_defaults()
    num_seqs = args.max_num_seqs
    if num_seqs is None:
        num_seqs = min(usual.max_num_seqs, len(prompts) * params.n)
    num_tokens = args.max_num_batched_tokens
    if num_tokens is None:
        num_tokens = min(usual.max_num_batched_tokens, 128 * max(1, num_seqs))
    with LLM(
        args.model,
        speculative_config=read_speculation(args),
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        page_size=args.page_size,
        verbose=not args.json,
    ) as llm:
        if args.chat:
            outputs = llm.chat(as_conversations(prompts), params)
        else:
            outputs = llm.generate(prompts, params)
        metrics = llm.metrics()
    if args.json:
        rows = [row for output in outputs for row in as_rows(output)]
        report = {"outputs": rows, "metrics": metrics.as_dict()}
        print(json.dumps(report, indent=2))
    else:
        print(
            "\n\n".join(
                as_text(prompt, output, len(outputs))
                for prompt, output in zip(prompts, outputs, strict=True)
            )
        )
    return 0


def read_sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Merge the options with --sampling-params, which takes precedence."""
    given = read_object("--sampling-params", args.sampling_params)
    known = {field.name for field in fields(SamplingParams)} - {"logits_processors", "output_kind"}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"--sampling-params has unknown keys {unknown}; known are {sorted(known)}")
    if isinstance(bias := given.get("logit_bias"), dict):  # JSON has no integer keys
        given["logit_bias"] = {int(k) if k.isdecimal() else k: bias[k] for k in bias}
    options = {
        "temperature": args.temperature,
        "seed": args.seed,
        "max_tokens": args.max_tokens,
        "stop_token_ids": args.stop_token_id,
        "ignore_eos": args.ignore_eos,
    }
    return SamplingParams(**(options | given))


def read_prompts(listed: list[str], file: str | None) -> list[Prompt]:
    """Return the prompts of the command line and of a file: one text or JSON object per line."""
    prompts: list[Prompt] = [*listed]
    if file is not None:
        try:
            lines = Path(file).expanduser().read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts-file {file} cannot be read: {error}") from error
        is_json = file.endswith(".jsonl")
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompts.append(_read_row(line, f"{file}:{number}") if is_json else line)
    if not prompts:
        raise ValueError("no prompts; give some as arguments or with --prompts-file")
    return prompts


def _read_row(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
    found = [key for key in _ROW_KEYS if isinstance(row, dict) and key in row]
    if len(found) != 1:
        raise ValueError(f"{where}: a row needs one of {', '.join(_ROW_KEYS)}")
    value = row[found[0]]
    expected = list if found[0] == "prompt_token_ids" else str
    if not isinstance(value, expected):
        raise ValueError(f"{where}: {found[0]} must be a {expected.__name__}, got {value!r}")
    return value if expected is str else {"prompt_token_ids": value}


def as_conversations(prompts: list[Prompt]) -> list[list[dict[str, str]]]:
    """Return each text as a conversation with one user message."""
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("--chat needs prompts of text, not token ids")
    return [[{"role": "user", "content": str(prompt)}] for prompt in prompts]


def as_rows(output: RequestOutput) -> list[dict[str, Any]]:
    """Return an output as JSON-compatible types, one row per sample."""
    apart = ("outputs", "metrics", "num_cached_tokens")
    request = {key: value for key, value in asdict(output).items() if key not in apart}
    return [request | asdict(completion) for completion in output.outputs]


def as_text(prompt: Prompt, output: RequestOutput, num_outputs: int) -> str:
    """Return an output as text (token ids without a tokenizer), below its prompt if not alone."""
    samples = [
        " ".join(map(str, one.token_ids)) if one.text is None else one.text.strip()
        for one in output.outputs
    ]
    text = "\n--\n".join(samples)
    return text if num_outputs == 1 else f"> {prompt}\n{text}"
