"""Declaration and parsing of arguments shared by commands. Imports nothing slow."""

import argparse
import json
from typing import Any

from specjax.checkpoint.demo import TARGET
from specjax.config import DTYPES, METHODS, OWN_METHODS, OWN_SHAPE

MODEL_HELP = f"a checkpoint in Hugging Face layout (folder or hub id), or a demo like {TARGET}"


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that `read_speculation` reads."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--drafter",
        metavar="CHECKPOINT",
        help="folder, hub id or demo; for --method mtp, by default, the model itself",
    )
    group.add_argument("--method", choices=tuple(METHODS), help="of drafting; default: eagle3")
    group.add_argument(
        "--k", type=int, metavar="K", help="drafts per step; default: 3, with --adaptive at most 5"
    )
    group.add_argument(
        "--adaptive", action="store_true", help="change K with load and acceptance, up to --k"
    )
    group.add_argument(
        "--speculative-config", metavar="JSON", help="all of it as one JSON object, instead"
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Declare the dtype and sizes of an engine."""
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
    group.add_argument("--max-num-seqs", type=int, help="requests that run together, at most")
    group.add_argument("--page-size", type=int, default=16, help="default: %(default)s")


def read_speculation(
    args: argparse.Namespace, *, takes_shapes: bool = False
) -> dict[str, Any] | None:
    """Return the `speculative_config` of an LLM; None for plain decoding.

    With `takes_shapes`, the drafter defaults to OWN_SHAPE for methods that need a shape.
    """
    flags = {"--drafter": args.drafter, "--method": args.method, "--k": args.k}
    given = [name for name, value in flags.items() if value is not None]
    given += ["--adaptive"] if args.adaptive else []
    if args.speculative_config is None:
        method = args.method or "eagle3"
        is_own = args.method in OWN_METHODS
        is_shape = takes_shapes and args.drafter is None and METHODS[method].needs_shape
        if args.drafter is None and given and not is_own and not is_shape:
            raise ValueError(f"{given[0]} goes with --drafter, which is missing")
        if not given:
            return None
        config = {
            "method": method,
            "model": OWN_SHAPE if is_shape else args.drafter,
        } | _read_k(args)
    else:
        if given:
            raise ValueError(f"--speculative-config says it all; leave out {given[0]}")
        config = read_object("--speculative-config", args.speculative_config)
    return config


def _read_k(args: argparse.Namespace) -> dict[str, Any]:
    if not args.adaptive:
        return {"num_speculative_tokens": 3 if args.k is None else args.k}
    return {"adaptive": True} | ({} if args.k is None else {"num_speculative_tokens": args.k})


def read_object(option: str, text: str) -> dict[str, Any]:
    """Parse the JSON object given to an option."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} is not JSON ({error}): {text}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object, got {text}")
    return value
