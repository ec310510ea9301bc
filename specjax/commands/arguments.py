"""Declares arguments that several commands share.

This module imports nothing slow, so that --help is fast.
"""

import argparse
from typing import Any

from specjax.checkpoint.demo import TARGET
from specjax.checkpoint.quantised.bits import BITS
from specjax.config import COLLECTIVES, DTYPES, KV_CACHE_DTYPES
from specjax.methods import METHODS, OWN_METHODS

DEVICE_OPTIONS = (
    *("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", "collectives"),
)

MODEL_HELP = f"a checkpoint in Hugging Face layout (folder or hub id), or a demo like {TARGET}"

DRAFTER_HELP = (
    f"METHOD is one of {', '.join(METHODS)}, by default determined by the checkpoint; "
    f"{' and '.join(OWN_METHODS)} need no checkpoint"
)


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that `speculation.read_speculation` reads."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--drafter",
        metavar="[METHOD=]CHECKPOINT",
        help=DRAFTER_HELP,
    )
    group.add_argument(
        "--method", choices=tuple(METHODS), help="the METHOD of --drafter, as a separate option"
    )
    group.add_argument(
        "--k", type=int, metavar="K", help="drafts per step; default: 3, with --adaptive at most 5"
    )
    group.add_argument(
        "--adaptive", action="store_true", help="change K with load and acceptance, up to --k"
    )
    group.add_argument(
        "--speculative-config", metavar="JSON", help="a JSON object, instead of the options above"
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for the dtype and the sizes of an engine."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="default: auto, the checkpoint's on a GPU, float32 on a CPU",
    )
    group.add_argument(
        "--max-model-len", type=int, help="default: the model's own, on a CPU at most 8192"
    )
    group.add_argument("--max-num-seqs", type=int, help="maximum number of running requests")
    group.add_argument("--page-size", type=int, default=16, help="default: %(default)s")
    group.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="numbers in pages; default: auto, those of --dtype",
    )


def add_quantization(parser: Any, *, required: bool = False) -> None:
    """Declare the argument for quantising an unquantised checkpoint."""
    parser.add_argument(
        "--quantization",
        choices=tuple(BITS),
        required=required,
        help="the numbers to which the weights of a plain checkpoint are rounded",
    )


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that `read_devices` reads."""
    group = parser.add_argument_group("several devices")
    group.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="devices per replica"
    )
    group.add_argument(
        "--data-parallel-size", type=int, default=1, metavar="N", help="replicas of the model"
    )
    group.add_argument(
        "--enable-expert-parallel", action="store_true", help="divide experts as a whole"
    )
    group.add_argument(
        "--collectives",
        choices=COLLECTIVES,
        default="auto",
        help="how GPUs exchange sums; default: %(default)s",
    )


def read_devices(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of an `LLM` about several devices."""
    return {name: getattr(args, name) for name in DEVICE_OPTIONS}
