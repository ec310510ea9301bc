"""Runs `specjax info --check`, which looks for faults of a drafter.

The command measures the drafter's acceptance on answers that its target generates.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specjax.bench.checkup import Tally, Text, Trial, as_gain, check, measure
from specjax.bench.workload import read_questions
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.hub import resolve
from specjax.checkpoint.tokenizer_files import check_tokenizer
from specjax.checks import read_object
from specjax.commands.info import read_model
from specjax.commands.speculation import read_speculation
from specjax.llm import LLM
from specjax.sampling_params import SamplingParams
from specjax.serving.drafters import with_method
from specjax.text.prompts import TokensPrompt
from specjax.text.tokenizer import ChatTokenizer

NUM_PROMPTS = 24  # maximum number of rows of --data
MAX_TOKENS = 64  # maximum number of tokens of an answer
MAX_MASKS = 8  # maximum number of special tokens that are tried as the mask
PLAIN, CHAT = "plain text", "chat template"
FORMS = {"question": CHAT, "text": PLAIN}  # form of a row's text, by the row's key
# Functions that turn a text into a prompt's token ids, by name.
Forms = dict[str, Callable[[str], list[int]]]


def run(args: argparse.Namespace) -> int:
    """Run `specjax info --check`. Return 1 if a fault is found, else 0."""
    if args.compile is not None:
        raise ValueError("--check runs a drafter and --compile only compiles a step; leave one out")
    model = read_model(args)
    given = read_speculation(args, model)
    if given is None:
        raise ValueError("--check needs a drafter; name one with --drafter, like --drafter mtp")
    config = with_method(given, model)
    rows = read_rows(None if args.data is None else Path(args.data))
    check_tokenizer(resolve(model))
    with LLM(
        model,
        speculative_config=config,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        page_size=args.page_size,
        kv_cache_dtype=args.kv_cache_dtype,
        verbose=False,
    ) as llm:
        folder = resolve(model if config.model is None else config.model)
        report = check_served(llm, rows, config.num_speculative_tokens, read_vocabularies(folder))
    print(json.dumps(report, indent=2) if args.json else "\n".join(as_lines(report)))
    return bool(report["faults"])


def read_rows(path: Path | None) -> list[tuple[str, str]]:
    """Return a pair (form, text) for each of the first `NUM_PROMPTS` rows of a .jsonl file.

    A row has "question" (a user's message, form `CHAT`) or "text" (a prompt without a template,
    form `PLAIN`). If `path` is None, the rows are the questions of `specjax bench`.

    Raises:
        ValueError: there is no row, or a row has neither key.
    """
    if path is None:
        return [(CHAT, question) for question in read_questions()]
    rows = []
    for number, line in enumerate(path.read_text().splitlines()[:NUM_PROMPTS], 1):
        row = read_object(f"--data {path}:{number}", line)
        found = [(form, row[key]) for key, form in FORMS.items() if isinstance(row.get(key), str)]
        if not found:
            raise ValueError(
                f'--data {path}:{number}: a row needs "question" or "text", got {sorted(row)}'
            )
        rows += found[:1]
    if not rows:
        raise ValueError(f"--data {path} has no rows")
    return rows


def read_vocabularies(folder: Path) -> dict[str, np.ndarray]:
    """Return a checkpoint's draft vocabulary as a mapping {"t2d": token ids}.

    The token ids come from the checkpoint's t2d mask. The mapping is empty if there is no such
    mask.
    """
    if not any(folder.glob("*.safetensors")):
        return {}
    tensors = open_checkpoint(folder)
    return {"t2d": np.flatnonzero(tensors.read("t2d"))} if "t2d" in tensors.names() else {}


def read_forms(tokenizer: ChatTokenizer) -> Forms:
    """Return the functions that turn a text into a prompt, by name. The default comes first."""
    if tokenizer.template is None:
        return {PLAIN: tokenizer.encode}

    def chat(text: str, **variables: Any) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables)

    forms: Forms = {CHAT: chat, PLAIN: tokenizer.encode}
    if "enable_thinking" in tokenizer.template:
        forms |= {
            f"{CHAT}, {name}": partial(chat, enable_thinking=value)
            for name, value in (("thinking", True), ("not thinking", False))
        }
    return forms


def read_masks(tokenizer: ChatTokenizer) -> list[int]:
    """Return at most `MAX_MASKS` special tokens. Each may be a drafter's mask token."""
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    return sorted(token for token, entry in added.items() if entry.special)[:MAX_MASKS]


def answer(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Text]:
    """Continue prompts greedily, by at most `MAX_TOKENS` tokens.

    Prompts are lists of token ids. Return each prompt together with its continuation.
    """
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, detokenize=False)
    given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    return [
        Text(np.array([*prompt, *output.outputs[0].token_ids], np.int32), len(prompt))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def check_served(
    llm: LLM, rows: Sequence[tuple[str, str]], k: int, vocabularies: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Check the drafter that `llm` serves, and return a report as JSON-compatible types.

    "served" has the drafter's figures while `llm` generated the texts. "reference" has its figures
    at some positions of these texts; see `bench.checkup`. "tried" has the figures of each trial. A
    trial is another setup of the drafter at the same positions, or another form of prompts with new
    texts. "faults" lists the faults that were found.
    """
    tokenizer, engine = llm.get_tokenizer(), llm.engine
    forms = read_forms(tokenizer)
    used = [form if form in forms else PLAIN for form, _ in rows]
    texts = answer(llm, [forms[form](text) for form, (_, text) in zip(used, rows, strict=True)])
    served = llm.metrics()
    found = check(
        llm.target,
        engine.params,
        engine.drafter,
        texts,
        k,
        mask_ids=read_masks(tokenizer),
        vocabularies=vocabularies,
    )
    tried, faults = dict(found.tried), list(found.faults)
    # Another form needs other texts, so it is tried only if no other fault was found.
    for form in forms if not faults else ():
        if form in used:
            continue
        own = Trial(form, engine.drafter, engine.params.drafter, engine.drafter.aux_layers)
        texts = answer(llm, [forms[form](text) for _, text in rows])
        tried |= measure(llm.target, engine.params.target, [own], texts, k)
        if found.reference.is_clearly_below(tried[form], is_paired=False):
            faults.append(
                f"prompts unlike the training prompts: {' and '.join(sorted(set(used)))} is used, "
                f"{form} is better ({as_gain(found.reference, tried[form])})"
            )
    return {
        "num_texts": len(rows),
        "served": {
            "length": served.mean_acceptance_length,
            "rates": [n / max(served.num_drafts, 1) for n in served.num_accepted_tokens_per_pos],
        },
        "reference": {"rates": found.reference.rates, **as_figures(found.reference)},
        "tried": {name: as_figures(tally) for name, tally in tried.items()},
        "faults": faults,
    }


def as_figures(tally: Tally) -> dict[str, float]:
    """Return the acceptance length, and the overlap of the drafter's and target's distributions.

    The overlap compares the distributions for the first draft. It is a mean over positions in the
    texts.
    """
    return {"length": tally.length, "in_common": float(tally.in_common.mean())}


def as_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report as lines of text."""
    yield f"{report['num_texts']} prompts, answered by the target, greedy"
    yield f"{'':40}acceptance length, overlap at the first draft, acceptance rates"
    for name, what in ("served", "served"), ("reference", "reference, each place separately"):
        found = report[name]
        rates = " ".join(f"{rate:.2f}" for rate in found["rates"])
        common = f"{found['in_common']:.0%}" if "in_common" in found else ""
        yield f"{what:40}{found['length']:.2f}  {common:4}{rates}"
    for name, found in report["tried"].items():
        yield f"{'with ' + name:40}{found['length']:.2f}  {found['in_common']:.0%}"
    yield from (f"fault: {fault}" for fault in report["faults"] or ["none found"])
