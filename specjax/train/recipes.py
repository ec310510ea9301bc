"""Runs `specjax train`: trains a model or a drafter, and writes its checkpoint with a model card.

`specjax train answers` trains nothing. It writes outputs of a target, on which drafters can be
trained.
"""

import json
import math
import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.hub import resolve
from specjax.checkpoint.save import copy_tokenizer, save_checkpoint
from specjax.checkpoint.tokenizer_files import read_tokenizer
from specjax.checkpoint.writing import write_whole
from specjax.checks import check_count, check_positive
from specjax.config import SpeculativeConfig
from specjax.device.models.model import Model
from specjax.device.models.registry import is_tied, load_model, plain_config, read_config
from specjax.llm import LLM
from specjax.sampling_params import SamplingParams
from specjax.serving.drafters import parse_drafter
from specjax.train.data import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    Document,
    read_documents,
    read_texts,
    train_tokenizer,
)
from specjax.train.drafter import KINDS, HeadSizes, InitialHead, Kind, train_drafter, warm_start
from specjax.train.loop import Schedule
from specjax.train.target import DEMOS, evaluate, train_target

COUNTS = (
    *("steps", "batch_size", "length", "vocab_size", "num_layers", "hidden_size", "num_prompts"),
    *("max_tokens", "num_unrolled", "draft_vocab_size", "block_size", "num_heads"),
    "markov_rank",
)
CARD_PROMPTS = 64
CARD_TOKENS = 128


def run(args: Namespace) -> int:
    """Run `specjax train KIND ...`."""
    recipes = {"target": _target, "answers": _answers}
    _check(args)
    recipes.get(args.kind, _drafter)(args)
    return 0


def _check(args: Namespace) -> None:
    """Validate options that would otherwise fail late or silently."""
    for name in COUNTS:
        if (value := getattr(args, name, None)) is not None:
            check_positive(**{f"--{name.replace('_', '-')}": value})
    check_count(**{"--seed": args.seed})
    if not 0 < (rate := getattr(args, "learning_rate", 1.0)) < math.inf:
        raise ValueError(f"--learning-rate={rate} must be above 0 and finite")
    if (width := getattr(args, "hidden_size", 64)) % 64:
        raise ValueError(f"--hidden-size={width} must be a multiple of 64, the size of a head")
    if args.kind == "dflash" and args.block_size == 1:
        raise ValueError("--block-size=1 drafts nothing; use at least 2")
    if args.kind == "answers" and args.out.is_dir():
        raise ValueError(f"--out {args.out} is a folder; name the .jsonl to write")
    if args.kind != "answers" and args.out.is_file():
        raise ValueError(f"--out {args.out} is a file; name the folder to write")


def _target(args: Namespace) -> None:
    texts = read_texts(args.data)
    tokenizer = train_tokenizer((prompt + answer for prompt, answer in texts), args.vocab_size)
    documents = read_documents(args.data, tokenizer)
    demo = DEMOS[args.architecture]
    model = demo.make(tokenizer.get_vocab_size(), args.num_layers, args.hidden_size)
    params, log = train_target(model, documents, _runs(args), _schedule(args))
    facts = {"training loss": f"{log[-1]['loss']:.3f}" if log else "resumed after its last step"}
    if args.held_out:
        held_out = read_documents(args.held_out, tokenizer)
        facts["held-out loss (nats per token)"] = (
            f"{evaluate(model, params, held_out, args.length):.3f}"
        )
    config = {
        **demo.to_hf(model),
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "torch_dtype": args.dtype,
    }
    save_checkpoint(args.out, model.specs(), params, config, dtype=jax.numpy.dtype(args.dtype))
    _save_tokenizer(args.out, tokenizer)
    _write_card(args, documents, params, facts)


def _answers(args: Namespace) -> None:
    texts = [prompt for prompt, _ in read_texts(args.data) if prompt]
    order = np.random.default_rng(args.seed).permutation(len(texts))[: args.num_prompts]
    # Half of the answers are greedy and half are sampled, to train the drafter on both.
    params = [
        SamplingParams(temperature=float(i % 2), max_tokens=args.max_tokens, detokenize=False)
        for i in range(len(order))
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    sizes = {"max_num_seqs": args.batch_size, "max_model_len": 512}
    with LLM(args.target, **sizes, seed=args.seed, verbose=True) as llm:  # it may take minutes
        outputs = llm.generate([texts[i] for i in order], params)
    rows = [
        {
            "prompt_token_ids": output.prompt_token_ids,
            "output_token_ids": output.outputs[0].token_ids,
        }
        for output in outputs
    ]
    write_whole(args.out, "".join(json.dumps(row) + "\n" for row in rows))


def _drafter(args: Namespace) -> None:
    kind, folder = KINDS[args.kind], resolve(args.target)
    stored = read_tokenizer(folder)
    if stored is None:
        raise ValueError(f"{folder} has no tokenizer.json, but the documents are texts; add it")
    target, target_params = load_model(folder, np.dtype("float32"))
    documents = read_documents(
        args.data, stored.tokenizer, stored.special_tokens.get("eos_token", EOS)
    )
    start = _start(args, kind, target, documents)
    num_drafts = kind.num_drafts(start)
    params, log = train_drafter(
        target,
        target_params,
        start,
        documents,
        _runs(args),
        _schedule(args),
        num_unrolled=num_drafts or getattr(args, "num_unrolled", 1),
    )
    head, extra = start.head, kind.vocabulary(start.head, params)
    if "target_ids" in start.frozen:  # not a weight; saved among the extra tensors
        params = replace(params, target_ids=None)
    specs, weights, config = head.specs(start.names), params, start.config
    if head.prefix_in_target is not None:  # the head is published inside the target's checkpoint
        specs, weights = (target.specs(), specs), (target_params, weights)
        config = plain_config(read_config(folder), is_tied=is_tied(target))
    dtype = jax.numpy.dtype(args.dtype)
    save_checkpoint(args.out, specs, weights, config, dtype=dtype, extra=extra, file=start.file)
    if head.prefix_in_target is not None:
        copy_tokenizer(folder, args.out)
    ks = sorted({min(3, num_drafts or 3), num_drafts or 3})
    _write_drafter_card(args, documents, params, log, ks)


def _start(args: Namespace, kind: Kind, target: Model, documents: list[Document]) -> InitialHead:
    """Return the head at the start of training: the head of --init, or a new head."""
    sizes = {field.name: getattr(args, field.name, None) for field in fields(HeadSizes)}
    if args.init is not None:
        if given := [name for name, value in sizes.items() if value is not None]:
            raise ValueError(
                f"--{given[0].replace('_', '-')} is for new heads; the head of --init {args.init} "
                "has its own, so leave it out"
            )
        named = parse_drafter(str(args.init), option="--init", method=kind.method)
        return warm_start(kind, resolve(named.model or args.target), target)
    if sizes["mask_token_id"] is None:
        sizes["mask_token_id"] = read_json(resolve(args.target), "config.json").get("bos_token_id")
    return kind.make(target, HeadSizes(**sizes), documents)


def _write_drafter_card(
    args: Namespace,
    documents: list[Document],
    params: Any,
    log: list[dict[str, float]],
    ks: Sequence[int],
) -> None:
    facts = {name: f"{value:.3f}" for name, value in (log[-1] if log else {}).items()}
    for k in ks if args.held_out else ():
        facts |= _measure_acceptance(args, k)
    _write_card(args, documents, params, facts)


def _measure_acceptance(args: Namespace, k: int) -> dict[str, str]:
    prompts = [prompt for prompt, _ in read_texts(args.held_out) if prompt][:CARD_PROMPTS]
    config = SpeculativeConfig(
        method=KINDS[args.kind].method, model=str(args.out), num_speculative_tokens=k
    )
    with LLM(args.target, speculative_config=config, max_model_len=512) as llm:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=CARD_TOKENS))
        metrics = llm.metrics()
    rates = ", ".join(f"{n / metrics.num_drafts:.2f}" for n in metrics.num_accepted_tokens_per_pos)
    return {
        f"mean acceptance length at K = {k} (greedy, {len(prompts)} held-out prompts, up to "
        f"{CARD_TOKENS} tokens each)": f"{metrics.mean_acceptance_length:.2f}",
        f"acceptance per position at K = {k}": rates,
    }


def _schedule(args: Namespace) -> Schedule:
    return Schedule(**{field.name: getattr(args, field.name) for field in fields(Schedule)})


def _runs(args: Namespace) -> Path:
    return args.runs or args.out.with_name(args.out.name + ".run")


def _save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    write_whole(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
    }
    write_whole(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def _write_card(
    args: Namespace, documents: list[Document], params: Any, facts: dict[str, str]
) -> None:
    command = shlex.join(_command(args))
    num_tokens = sum(len(document.tokens) for document in documents)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    lines = [
        f"# {args.out.name}",
        "",
        f"{num_params:,} parameters in {args.dtype}, trained on {len(documents):,} documents "
        f"({num_tokens:,} tokens) with:",
        "",
        f"    {command}",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
    ]
    write_whole(args.out / "README.md", "\n".join(lines) + "\n")
    Console(stderr=True).print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _command(args: Namespace) -> list[str]:
    words = ["specjax", "train", args.kind]
    for name, value in vars(args).items():
        if name in ("kind", "command", "runs") or value is None:
            continue
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *(_short(v) for v in values)]
    return words


def _short(value: Any) -> str:
    return str(Path(*value.parts[-2:])) if isinstance(value, Path) else str(value)
