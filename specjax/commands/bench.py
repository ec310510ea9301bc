"""Declares the arguments of `specjax bench` and `specjax profile`.

This module imports nothing slow, so that --help is fast.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import NamedTuple

from specjax.checkpoint.demo import DRAFTERS, TARGET
from specjax.commands.arguments import DRAFTER_HELP, MODEL_HELP, add_devices, add_quantization
from specjax.commands.bench_arguments import (
    REPORT,
    add_compare_arguments,
    add_latency_arguments,
    add_report_arguments,
    add_serve_arguments,
    add_sweep_serve_arguments,
    add_throughput_arguments,
)
from specjax.config import DTYPES
from specjax.host.speculation import POLICIES

DESCRIPTION = "Measure the gain of speculation on real prompts."
PROFILE_DESCRIPTION = "Measure step times and acceptance rates, to choose K from."
LATENCY = "Time one batch of prompts from beginning to end."
THROUGHPUT = "Measure how fast a set of prompts is generated, given all at once."
SERVE = "Send requests to a server at a rate, and measure the latencies that clients see."
SWEEP = "Compare static K, dynamic K and no speculation at several batch sizes, and plot them."
SWEEP_SERVE = "Run `serve` at several rates and concurrencies: throughput against latency."
SIMULATE = "Run a policy on a profile's times and rates, against an oracle, without a device."
REPORTED = "Draw a saved result as a page, a Markdown text or a picture."
COMPARE = "Say what differs between two saved results, and which changes are beyond noise."
SHOW = "Print a profile's time per output token, by batch size and K."
_CONFIG = 'a drafter as a JSON object, without K, like \'{"method": "eagle3", "with": ["suffix"]}\''
_BATCH = "prompts that decode together on each replica"
PROFILE_HELP = "a profile, as `specjax profile` writes it"


class Subcommand(NamedTuple):
    """A subcommand of `specjax bench`.

    Attributes:
        module: the module whose `run(args)` runs the subcommand.
        add_arguments: a function that declares the subcommand's arguments.
    """

    help: str
    module: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `specjax bench`, and its subcommands."""
    add_speculation_arguments(parser)
    kinds = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND")
    for name, one in SUBCOMMANDS.items():
        kind = kinds.add_parser(name, help=one.help, description=one.help, allow_abbrev=False)
        one.add_arguments(kind)


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that `specjax.bench.speculation.run` reads."""
    parser.add_argument("--model", default=TARGET, help=f"{MODEL_HELP}; default: {TARGET}")
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="[METHOD=]CHECKPOINT",
        help=f"may be repeated; {DRAFTER_HELP}; the demos {', '.join(DRAFTERS)} have defaults",
    )
    parser.add_argument(
        "--speculative-config", action="append", metavar="JSON", help=f"may be repeated; {_CONFIG}"
    )
    parser.add_argument(
        "--k",
        metavar="K,K",
        help="drafts per step, 0 for a drafter that drafts nothing; "
        "default: 0,3,5, with --full 1,2,3,5",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="all drafters of a demo, more Ks and all prompts, unless other options set them",
    )
    parser.add_argument("--batch-size", type=int, default=1, help=_BATCH)
    parser.add_argument("--num-prompts", type=int, help="default: 8, with --full all that ship, 24")
    parser.add_argument("--max-tokens", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--max-model-len", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1, help="passes over the prompts")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    add_quantization(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--output", "--output-json", metavar="FILE", help="also write the JSON to a file"
    )
    parser.add_argument("--report", metavar="FILE", help=REPORT)
    add_devices(parser)


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `specjax profile` and of its subcommands."""
    _add_profile(parser)
    kinds = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND")
    _add_show(kinds.add_parser("show", help=SHOW, description=SHOW, allow_abbrev=False))


def _add_profile(parser: argparse.ArgumentParser) -> None:
    _add_setup(parser, ks="0,1,3,5", batch_sizes="1,4,16", max_tokens=64, rounds=3)
    parser.add_argument(
        "--output", default="profile.json", metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument(
        "--online", action="store_true", help="let its rates be learned further while serving"
    )


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="sweep_kind", metavar="KIND")
    serve = kinds.add_parser("serve", help=SWEEP_SERVE, description=SWEEP_SERVE, allow_abbrev=False)
    add_sweep_serve_arguments(serve)
    _add_setup(parser, ks="0,1,2,3,5", batch_sizes="1,4,16,64", max_tokens=48, rounds=3)
    parser.add_argument(
        "--profile", metavar="FILE", help=f"{PROFILE_HELP}: adds the policies 'table' and 'profile'"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="a PNG; default: sweep.png, if matplotlib is there"
    )
    parser.add_argument(
        "--output", "--output-json", metavar="FILE", help="also write the JSON to a file"
    )


def _add_setup(
    parser: argparse.ArgumentParser, *, ks: str, batch_sizes: str, max_tokens: int, rounds: int
) -> None:
    """Declare the arguments that become the fields of `engines.Setup`."""
    parser.add_argument("--model", default=TARGET, help=f"{MODEL_HELP}; default: {TARGET}")
    parser.add_argument(
        "--drafter",
        metavar="[METHOD=]CHECKPOINT",
        help=f"{DRAFTER_HELP}; the demos have defaults",
    )
    parser.add_argument("--speculative-config", metavar="JSON", help=_CONFIG)
    parser.add_argument("--k", default=ks, metavar="K,K", help="drafts; default: %(default)s")
    parser.add_argument(
        "--batch-size",
        default=batch_sizes,
        metavar="B,B",
        help=f"{_BATCH}; default: %(default)s",
    )
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="default: %(default)s")
    parser.add_argument("--max-model-len", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    add_quantization(parser)
    parser.add_argument(
        "--synthetic-rates",
        metavar="R,R",
        help="accept drafts at these rates by position, regardless of their tokens; one per draft",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_devices(parser)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", required=True, metavar="FILE", help=PROFILE_HELP)
    parser.add_argument(
        "--policy", required=True, metavar="POLICY", help=f"one of {', '.join(POLICIES)}"
    )
    parser.add_argument(
        "--acceptance-shift",
        type=float,
        default=0.0,
        metavar="L",
        help="added to all log-odds of acceptance half-way; default: %(default)s",
    )
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--requests", type=int, default=256, metavar="N", help="per seed; default: %(default)s"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=0,
        metavar="N",
        help="tokens in the prompt of every second request; default: %(default)s",
    )
    parser.add_argument(
        "--text-acceptance",
        type=float,
        default=0.0,
        metavar="RATE",
        help="drafts of every second request come from texts, and are accepted at this rate; "
        "default: no texts",
    )
    parser.add_argument(
        "--one-k", action="store_true", help="adaptive K is the same for all requests of a round"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", metavar="FILE", help=PROFILE_HELP)
    parser.add_argument("--batch-size", metavar="B,B", help="default: the sizes in the profile")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


_COMMANDS, _BENCH = "specjax.commands.bench_", "specjax.bench."
SUBCOMMANDS: Mapping[str, Subcommand] = {
    "latency": Subcommand(LATENCY, f"{_COMMANDS}latency", add_latency_arguments),
    "throughput": Subcommand(THROUGHPUT, f"{_COMMANDS}throughput", add_throughput_arguments),
    "serve": Subcommand(SERVE, f"{_COMMANDS}serve", add_serve_arguments),
    "sweep": Subcommand(SWEEP, f"{_BENCH}sweep", _add_sweep),
    "simulate": Subcommand(SIMULATE, f"{_BENCH}simulate", _add_simulate),
    "profile": Subcommand(PROFILE_DESCRIPTION, f"{_BENCH}profile", _add_profile),
    "speculation": Subcommand(DESCRIPTION, f"{_BENCH}speculation", add_speculation_arguments),
    "report": Subcommand(REPORTED, f"{_COMMANDS}report", add_report_arguments),
    "compare": Subcommand(COMPARE, f"{_COMMANDS}compare", add_compare_arguments),
}
