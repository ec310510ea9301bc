"""Declares the arguments of `specjax bench latency`, `throughput` and `serve`.

This module imports nothing slow, so that --help is fast.
"""

import argparse
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from specjax.bench.datasets import DATASETS, DEFAULT
from specjax.checkpoint.demo import TARGET
from specjax.commands.arguments import (
    MODEL_HELP,
    add_devices,
    add_engine,
    add_quantization,
    add_speculation,
)

SAMPLING = {
    "top_p": (float, "P", "1 keeps all"),
    "top_k": (int, "K", "0 keeps all"),
    "min_p": (float, "P", "0 keeps all"),
    "repetition_penalty": (float, "X", "1 changes nothing"),
    "frequency_penalty": (float, "X", "0 changes nothing"),
    "presence_penalty": (float, "X", "0 changes nothing"),
}
REPORT = "draw the result: FILE.html is a page, FILE.md has tables, FILE.png has charts"
AGAINST_OFFLINE = (
    "other engines, in separate processes, on the same prompts: transformers, transformers-compiled"
)
AGAINST_SERVED = (
    "other engines on the same requests: vllm, sglang, or the URL of a server; they run one after "
    "another"
)


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench_latency.run`."""
    _add_offline(parser, num_prompts=None)
    parser.add_argument("--batch-size", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--num-iters", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="default: %(default)s")


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench_throughput.run`."""
    _add_offline(parser, num_prompts=24)
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="passes over the prompts, after one that is not timed; default: %(default)s",
    )
    parser.add_argument(
        "--against", action="append", default=[], metavar="PEER", help=AGAINST_OFFLINE
    )


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench_serve.run`."""
    load = _add_served(parser)
    load.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="R",
        help="requests per second; default: inf, all at once",
    )
    load.add_argument("--max-concurrency", type=int, metavar="N", help="requests at a time")


def add_sweep_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench_sweep.run`."""
    load = _add_served(parser)
    load.add_argument(
        "--request-rate", metavar="R,R", help="requests per second, like 1,4,inf; default: inf"
    )
    load.add_argument(
        "--max-concurrency", metavar="N,N", help="requests at a time, like 1,8; default: no limit"
    )


def _add_served(parser: argparse.ArgumentParser) -> Any:
    """Declare the arguments that `serve` and `sweep serve` share.

    Return the group of options about the load.
    """
    _add_endpoint(parser)
    load = _add_load(parser)
    _add_figures(parser)
    _add_engine(parser)
    _add_data(parser, num_prompts=24)
    _add_output(parser)
    return load


def _add_endpoint(parser: argparse.ArgumentParser) -> None:
    endpoint = parser.add_argument_group(
        "endpoint",
        "Without --base-url, a server is started: `specjax serve` in a separate process, with "
        "the engine's options.",
    )
    endpoint.add_argument("--base-url", metavar="URL", help="a running server")
    endpoint.add_argument(
        "--backend",
        "--endpoint-type",
        default="openai",
        metavar="FORM",
        help="openai (completions; also named vllm) or openai-chat; default: %(default)s",
    )
    endpoint.add_argument("--served-model-name", metavar="NAME", help="default: the server's first")
    endpoint.add_argument(
        "--tokenizer", metavar="CHECKPOINT", help="the tokenizer's checkpoint; default: --model"
    )
    endpoint.add_argument(
        "--skip-tokenizer-init", action="store_true", help="send texts, and count as the server"
    )
    endpoint.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="may be repeated"
    )
    endpoint.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="more fields of each request"
    )
    endpoint.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=600.0,
        metavar="S",
        help="time to wait for a server that is being started; default: %(default)g",
    )


def _add_load(parser: argparse.ArgumentParser) -> Any:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="shape of the gamma distribution of gaps; 1, the default, is a Poisson process",
    )
    load.add_argument("--ramp-up-strategy", choices=("linear", "exponential"))
    load.add_argument("--ramp-up-start-rps", type=float, metavar="R")
    load.add_argument("--ramp-up-end-rps", type=float, metavar="R")
    load.add_argument(
        "--num-warmups", type=int, default=1, metavar="N", help="untimed requests first"
    )
    load.add_argument("--ignore-eos", action="store_true", help="go on past the end")
    return load


def _add_figures(parser: argparse.ArgumentParser) -> None:
    figures = parser.add_argument_group("figures")
    figures.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="M,M",
        help="times to report; default: %(default)s",
    )
    figures.add_argument(
        "--metric-percentiles", default="90,99", metavar="P,P", help="default: %(default)s"
    )
    figures.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="LIMIT",
        help="limits with units, like ttft:200ms tpot:10ms e2el:2s",
    )
    figures.add_argument(
        "--against", action="append", default=[], metavar="PEER", help=AGAINST_SERVED
    )
    figures.add_argument(
        "--peer-args", default="", metavar="ARGS", help="more arguments of a peer's command"
    )
    figures.add_argument("--label", help="a name of the run, for the result")
    figures.add_argument(
        "--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="more keys of the result"
    )
    figures.add_argument(
        "--save-result", action="store_true", help="write the JSON, in --result-dir"
    )
    figures.add_argument("--result-dir", default=".", metavar="FOLDER")
    figures.add_argument("--result-filename", metavar="FILE")
    figures.add_argument(
        "--save-detailed", action="store_true", help="also write lists with each request"
    )


def _add_offline(parser: argparse.ArgumentParser, *, num_prompts: int | None) -> None:
    _add_engine(parser)
    _add_data(parser, num_prompts=num_prompts)
    _add_output(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=None, help=f"{MODEL_HELP}; default: {TARGET}")
    add_engine_options(parser)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the engine that a benchmark measures."""
    add_speculation(parser)
    add_engine(parser)
    add_quantization(parser)
    add_devices(parser)
    parser.add_argument(
        "--synthetic-rates",
        metavar="R,R",
        help="accept drafts at these rates by position, regardless of their tokens; one per draft",
    )


def _add_data(parser: argparse.ArgumentParser, *, num_prompts: int | None) -> None:
    group = parser.add_argument_group("data set")
    group.add_argument(
        "--dataset-name",
        default=DEFAULT,
        metavar="NAME",
        help=f"one of {', '.join(DATASETS)}; default: %(default)s, of which 24 rows ship",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="its file, which you download")
    if num_prompts is not None:
        group.add_argument(
            "--num-prompts", type=int, default=num_prompts, help="default: %(default)s"
        )
    group.add_argument("--seed", type=int, default=0, help="of all random choices")
    group.add_argument("--input-len", type=int, metavar="N", help="tokens of random prompts")
    group.add_argument("--output-len", type=int, metavar="N", help="tokens to generate at most")
    group.add_argument("--disable-shuffle", action="store_true", help="keep the file's order")
    group.add_argument("--no-oversample", action="store_true", help="use no row twice")
    group.add_argument(
        "--skip-chat-template", action="store_true", help="messages are whole prompts"
    )
    group.add_argument(
        "--chat-template-kwargs",
        default="{}",
        metavar="JSON",
        help="variables of the chat template, like '{\"enable_thinking\": false}'",
    )
    for name, dataset in DATASETS.items():
        for one in _options(dataset):
            _add_dataset_option(group, name, dataset, one)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default, is greedy"
    )
    for name, (kind, metavar, text) in SAMPLING.items():
        flag = f"--{name.replace('_', '-')}"
        sampling.add_argument(flag, type=kind, metavar=metavar, help=text)
    sampling.add_argument(
        "--verify-lossless",
        action="store_true",
        help="decode again without drafts, and compare all tokens",
    )


def _options(dataset: Any) -> list[Any]:
    """Return the dataclass fields of a data set that are command-line options."""
    return [one for one in fields(dataset) if "help" in one.metadata]


def _add_dataset_option(group: Any, name: str, dataset: Any, one: Any) -> None:
    hint = get_type_hints(type(dataset))[one.name]
    plain = [kind for kind in get_args(hint) or (hint,) if kind in (int, float, str)]
    text = one.metadata["help"]
    if one.default not in (None, ""):
        text += f"; default: {one.default}"
    group.add_argument(
        f"--{name}-{one.name.replace('_', '-')}",
        type=plain[0],
        metavar=plain[0].__name__.upper(),
        dest=dest_of(name, one.name),
        default=argparse.SUPPRESS,
        help=text,
    )


def dest_of(dataset: str, option: str) -> str:
    """Return the name of a data set's option in the parsed arguments."""
    return f"{dataset.replace('-', '_')}_{option}"


def given_options(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the options on the command line that belong to the data set `name`.

    Raises:
        ValueError: an option of another data set was given.
    """
    found: dict[str, Any] = {}
    for other, dataset in DATASETS.items():
        for one in _options(dataset):
            dest = dest_of(other, one.name)
            if not hasattr(args, dest):
                continue
            if other != name:
                flag = f"--{other}-{one.name.replace('_', '-')}"
                raise ValueError(f"{flag} goes with --dataset-name {other}, not {name}")
            found[one.name] = getattr(args, dest)
    return found


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")
    group.add_argument("--output-json", metavar="FILE", help="write the JSON to a file")
    group.add_argument("--report", metavar="FILE", help=REPORT)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench_report.run`."""
    parser.add_argument("result", metavar="RESULT.json", help="a result, as --output-json wrote it")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="report.html",
        help=f"{REPORT}; default: %(default)s",
    )


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench_compare.run`."""
    parser.add_argument(
        "before",
        metavar="A.json",
        help="a result, as --output-json wrote it; or repeated ones, separated by commas",
    )
    parser.add_argument("after", metavar="B.json", help="the same, of the same workload")
    parser.add_argument(
        "--fail-over",
        metavar="5%",
        help="end with code 1 if a figure is worse by more than this, and beyond noise",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
