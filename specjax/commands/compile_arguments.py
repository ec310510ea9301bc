"""The arguments of `specjax info --compile`. Imports nothing slow."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that `compile_report.run` reads."""
    group = parser.add_argument_group(
        "compilation",
        "What XLA makes of a decode step on a GPU that need not be here, in bf16, with --drafter "
        "and --k: --drafter mtp takes no drafter's files, and --drafter eagle without a checkpoint "
        "stands for an EAGLE-1 head of the model's own shape (one layer, no weights). "
        "--k 0 is a step without drafts. Weights are never read. Needs jax's CUDA plugin.",
    )
    group.add_argument("--compile", metavar="TARGET", help="compile for TARGET: h100 or h200")
    group.add_argument("--batch-size", type=int, metavar="B", help="requests; default: 1")
    group.add_argument(
        "--context", type=int, metavar="TOKENS", help="of each request; default: 2048"
    )
    group.add_argument(
        "--gemm",
        metavar="KIND",
        help="triton, what XLA makes without autotuning, the default, or cublas",
    )
    group.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="compile the target's first N layers alone, which is sooner done: figures of a layer "
        "hold, those of the step are of so small a model",
    )
    group.add_argument(
        "--resources",
        action="store_true",
        help="have ptxas tell registers, spills and shared memory of each Pallas kernel",
    )
