"""Reads the arguments that `specjax bench latency`, `throughput` and `serve` share."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specjax.bench.datasets import DATASETS
from specjax.bench.datasets.queries import DatasetSettings
from specjax.bench.engines import read_rates
from specjax.checkpoint.demo import TARGET
from specjax.checkpoint.hub import resolve
from specjax.checkpoint.tokenizer_files import check_tokenizer
from specjax.checkpoint.writing import check_writable
from specjax.checks import did_you_mean, read_object
from specjax.commands.arguments import read_devices
from specjax.commands.bench_arguments import SAMPLING, add_engine_options, given_options
from specjax.commands.speculation import read_speculation
from specjax.sampling_params import SamplingParams
from specjax.text.tokenizer import ChatTokenizer, load_tokenizer

_ENGINE = "dtype", "max_model_len", "max_num_seqs", "page_size", "kv_cache_dtype", "quantization"


def read_dataset(args: argparse.Namespace, num_prompts: int) -> DatasetSettings:
    """Return the settings of the data set. `num_prompts` is the number of prompts to use.

    Raises:
        ValueError: there is no such data set, or options contradict each other.
    """
    name = args.dataset_name.replace("_", "-")  # vLLM accepts both
    if name not in DATASETS:
        known = ", ".join(DATASETS)
        raise ValueError(
            f"--dataset-name {args.dataset_name} is none of {known}{did_you_mean(name, DATASETS)}"
        )
    dataset: Any = DATASETS[name]
    return DatasetSettings(
        name=name,
        dataset=replace(dataset, **given_options(args, name)),
        path=Path(args.dataset_path).expanduser() if args.dataset_path else None,
        num_prompts=num_prompts,
        seed=args.seed,
        input_len=args.input_len,
        output_len=args.output_len,
        shuffles=not args.disable_shuffle,
        oversamples=not args.no_oversample,
        applies_template=not args.skip_chat_template,
        template_kwargs=read_object("--chat-template-kwargs", args.chat_template_kwargs),
    )


def read_sampling(args: argparse.Namespace, *, ignore_eos: bool) -> dict[str, Any]:
    """Return the temperature, and the other fields of `SamplingParams` that were given.

    Raises:
        ValueError: a value is invalid.
    """
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    sampling = {"temperature": args.temperature, **given}
    if ignore_eos:
        sampling["ignore_eos"] = True
    SamplingParams(**sampling)
    return sampling


def read_engine(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Return the options of an `LLM`.

    Raises:
        ValueError: options contradict each other.
    """
    options = {name: getattr(args, name) for name in _ENGINE}
    return {
        **options,
        **read_devices(args),
        "speculative_config": read_synthetic(args, read_speculation(args, model)),
    }


def read_synthetic(
    args: argparse.Namespace, speculation: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the speculative config `speculation`, with the rates of --synthetic-rates if given.

    Raises:
        ValueError: rates are invalid, given without a drafter, or given with --verify-lossless.
    """
    rates = read_rates(args.synthetic_rates)
    if rates is None:
        return speculation
    if speculation is None:
        raise ValueError("--synthetic-rates goes with --drafter, which is missing")
    if args.verify_lossless:
        raise ValueError("--verify-lossless contradicts --synthetic-rates, which changes tokens")
    return speculation | {
        "verification": "synthetic",
        "synthetic_acceptance_rates": rates,
    }


def given_engine_options(args: argparse.Namespace) -> list[str]:
    """Return the engine's flags that do not have their default values."""
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    defaults: Mapping[str, Any] = vars(parser.parse_args([]))
    given = [name for name, value in defaults.items() if getattr(args, name) != value]
    return [f"--{name.replace('_', '-')}" for name in given]


def read_model(args: argparse.Namespace) -> str:
    """Return the model, by default the demo."""
    return args.model or TARGET


def read_tokenizer(model: str) -> ChatTokenizer:
    """Return the tokenizer of a checkpoint.

    Raises:
        ValueError: the checkpoint has none.
    """
    folder = resolve(model)
    check_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, which the data set's prompts need")
    return tokenizer


def check_outputs(**paths: str | None) -> None:
    """Check that output files can be written, and that no two options name the same file.

    The keywords are names of options, and the values their files.

    Raises:
        ValueError: a file cannot be written, or two options name the same one.
    """
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        if not path:
            continue
        option, resolved = f"--{name.replace('_', '-')}", Path(path).expanduser().resolve()
        if resolved in seen:
            raise ValueError(f"{seen[resolved]} and {option} both write {path}; name two files")
        seen[resolved] = option
        check_writable(option, Path(path))
