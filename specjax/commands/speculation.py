"""Reads the arguments of `arguments.add_speculation` into a speculative config."""

import argparse
from typing import Any

from specjax.checkpoint.demo import with_demo_drafter
from specjax.checks import read_object
from specjax.serving.drafters import parse_drafter


def read_speculation(
    args: argparse.Namespace, target: str | None, *, takes_shapes: bool = False
) -> dict[str, Any] | None:
    """Return the `speculative_config` of an `LLM`, or None for plain decoding.

    Args:
        target: the target's checkpoint, or None.
        takes_shapes: whether the caller needs only the shapes of the drafter's weights. If so, a
            method with weights needs no checkpoint. If none is given, the config's "model" is
            `OWN_SHAPE`: the drafter's shapes follow from the target's.

    Raises:
        ValueError: options contradict each other or are malformed.
        CheckpointError: the drafter's files do not indicate its method.
    """
    flags = {"--drafter": args.drafter, "--method": args.method, "--k": args.k}
    given = [name for name, value in flags.items() if value is not None]
    given += ["--adaptive"] if args.adaptive else []
    if args.speculative_config is not None:
        if given:
            raise ValueError(f"--speculative-config sets everything; leave out {given[0]}")
        config = read_object("--speculative-config", args.speculative_config)
        return with_demo_drafter(config, target)
    if not given:
        return None
    if args.drafter is None and args.method is None:
        raise ValueError(f"{given[0]} goes with --drafter, which is missing")
    if args.drafter is None:
        named = parse_drafter(
            args.method, option="--method", target=target, takes_shapes=takes_shapes
        )
    else:
        named = parse_drafter(
            args.drafter, method=args.method, target=target, takes_shapes=takes_shapes
        )
    return named._asdict() | _read_k(args)


def _read_k(args: argparse.Namespace) -> dict[str, Any]:
    if not args.adaptive:
        return {"num_speculative_tokens": 3 if args.k is None else args.k}
    return {"adaptive": True} | ({} if args.k is None else {"num_speculative_tokens": args.k})
