"""Runs `specjax generate`: completes prompts, and prints the outputs.

The prompts come from the command line or from a file.
"""

import argparse
import json
import re
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from specjax import vllm_names
from specjax.checkpoint.demo import NAMES
from specjax.checkpoint.hub import resolve
from specjax.checkpoint.tokenizer_files import check_tokenizer
from specjax.checks import is_integer, read_object
from specjax.commands.arguments import read_devices
from specjax.commands.speculation import read_speculation
from specjax.device.models.registry import describe_model, read_config
from specjax.llm import LLM, Prompt
from specjax.outputs import CompletionOutput, RequestOutput
from specjax.sampling_params import RequestOutputKind, SamplingParams, check_text
from specjax.text.chat import render_conversations
from specjax.text.prompts import TokensPrompt
from specjax.vllm_names import take_keys

# Fields of SamplingParams that are options with the same name.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "stop", "ignore_eos"),
)
_PATH = re.compile(r"(?:/|~/|\.{1,2}/)\S*")
_ROW_KEYS = ("prompt", "question", "prompt_token_ids")


def run(args: argparse.Namespace) -> int:
    """Run `specjax generate`. Each output is printed when it finishes."""
    prompts = read_prompts(args.prompts, args.prompts_file)
    conversations = as_conversations(prompts) if args.chat else None
    params = read_sampling_params(args)
    check_for_model(prompts, args.model)
    num_finished = 0
    try:
        # Sizes have the same defaults as in `LLM`, so that both run the same programs.
        with LLM(
            args.model,
            speculative_config=read_speculation(args, args.model),
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            page_size=args.page_size,
            kv_cache_dtype=args.kv_cache_dtype,
            quantization=args.quantization,
            **read_devices(args),
        ) as llm:
            given = prompts if conversations is None else render(llm, conversations)
            for output in llm.generate_stream(given, params, use_tqdm=True):
                num_finished += 1
                if args.json:
                    lines = [json.dumps(row) for row in as_rows(output)]
                else:
                    prompt = prompts[int(str(output.request_id))]
                    lines = [""] * (num_finished > 1) + [as_text(prompt, output, len(prompts))]
                print("\n".join(lines), flush=True)
            if args.json:
                print(json.dumps({"metrics": llm.metrics().as_dict()}))
    except KeyboardInterrupt:
        left = f"{len(prompts) - num_finished} of {len(prompts)} prompts did not finish"
        print(f"specjax: {left}", file=sys.stderr)
        raise
    return 0


def read_sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters from the options and from --sampling-params.

    If both give a parameter, --sampling-params takes precedence.
    """
    given = read_object("--sampling-params", args.sampling_params)
    known = {field.name for field in fields(SamplingParams)} - {"logits_processors", "output_kind"}
    given = take_keys(given, vllm_names.SAMPLING, "--sampling-params", known)
    if isinstance(bias := given.get("logit_bias"), dict):  # JSON has no integer keys
        given["logit_bias"] = {int(k) if k.isdecimal() else k: bias[k] for k in bias}
    options = {name: getattr(args, name) for name in SAMPLING}
    options |= {"stop_token_ids": args.stop_token_id, "output_kind": RequestOutputKind.FINAL_ONLY}
    return SamplingParams(**(options | given))


def read_prompts(listed: list[str], file: str | None) -> list[Prompt]:
    """Return the prompts in `listed`, from the command line, and then the prompts of a file.

    Each line of a file is a text, or a JSON object if the file is a .jsonl.
    """
    for text in listed:
        is_folder = len(text) < 256 and (Path(text) / "config.json").is_file()
        if text in NAMES or _PATH.fullmatch(text) or is_folder:
            raise ValueError(
                f"the prompt {text!r} looks like a model; give models with --model, and such "
                "prompts with --prompts-file"
            )
    for i, text in enumerate(listed):  # bytes that are not UTF-8 become surrogates
        check_text(f"prompt {i}", text)
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
    if isinstance(value, str):
        check_text(f"{where}: {found[0]}", value)
        return value
    return {"prompt_token_ids": value}


def check_for_model(prompts: list[Prompt], model: str) -> None:
    """Check, before the model is loaded, that it can read the prompts.

    Raises:
        ValueError: a prompt has a token id that is not in the vocabulary.
        CheckpointError: there is no such checkpoint, its model is not supported, or it has no
            tokenizer although a prompt is a text.
    """
    folder = resolve(model)
    if any(isinstance(prompt, str) for prompt in prompts):
        check_tokenizer(folder)
    if all(isinstance(prompt, str) for prompt in prompts):
        return
    vocab_size = describe_model(read_config(folder)).vocab_size
    for i, prompt in enumerate(prompts):
        ids = prompt.get("prompt_token_ids", ()) if isinstance(prompt, dict) else ()
        if bad := [x for x in ids if not is_integer(x) or not 0 <= x < vocab_size]:
            raise ValueError(
                f"prompt {i} has {bad[0]!r}, which is not a token id of {model}: its ids are the "
                f"integers 0..{vocab_size - 1}; use its own tokenizer"
            )


def as_conversations(prompts: list[Prompt]) -> list[list[dict[str, str]]]:
    """Return each text as a conversation with one user message."""
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("--chat needs prompts of text, not token ids")
    return [[{"role": "user", "content": str(prompt)}] for prompt in prompts]


def render(llm: LLM, conversations: list[list[dict[str, str]]]) -> list[TokensPrompt]:
    """Return the conversations as prompts, rendered with the checkpoint's chat template."""
    return render_conversations(
        llm.get_tokenizer(),
        conversations,
        content_format="auto",
        variables={},
        add_generation_prompt=True,
    )


def as_rows(output: RequestOutput) -> list[dict[str, Any]]:
    """Return an output as JSON-compatible types, with one row per sample."""
    apart = ("outputs", "metrics", "num_cached_tokens", "rounds")
    request = asdict(output)
    rows = [request | sample for sample in request["outputs"]]
    return [
        {key: value for key, value in row.items() if key not in apart}
        | {"error": None if row["error"] is None else str(row["error"])}
        for row in rows
    ]


def as_text(prompt: Prompt, output: RequestOutput, num_outputs: int) -> str:
    """Return the text of an output, or its token ids if it has no text.

    `num_outputs` is the number of outputs of the command. If it is above 1, the text begins with
    the prompt.
    """
    text = "\n--\n".join(_sample_text(one) for one in output.outputs)
    return text if num_outputs == 1 else f"> {prompt}\n{text}"


def _sample_text(one: CompletionOutput) -> str:
    if one.error is not None:
        return f"failed: {one.error}"
    return " ".join(map(str, one.token_ids)) if one.text is None else one.text.strip()
