"""Declares the arguments of `specjax info --compile`.

This module imports nothing slow, so that --help is fast.
"""

import argparse

NAMES = ("batch_size", "context", "gemm", "layers", "resources")
NAMES += ("tensor_parallel_size", "enable_expert_parallel", "collectives")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that `compile_report.run` reads."""
    group = parser.add_argument_group(
        "compilation",
        "Report on a bf16 decode step, compiled for a GPU that need not be present, with --drafter "
        "and --k: --drafter mtp needs no drafter's files, and --drafter eagle without a checkpoint "
        "means an EAGLE-1 head of the model's own shape (one layer, no weights). "
        "--k 0 is a step without drafts. Weights are never read. Needs jax's CUDA plugin.",
    )
    group.add_argument("--compile", metavar="TARGET", help="compile for TARGET: h100 or h200")
    group.add_argument("--batch-size", type=int, metavar="B", help="requests; default: 1")
    text = "per request; default: 2048, or as many as the model allows"
    group.add_argument("--context", type=int, metavar="TOKENS", help=text)
    group.add_argument(
        "--gemm",
        metavar="KIND",
        help="triton (XLA without autotuning, the default) or cublas",
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="GPUs that divide the model; the report is about each of them (default: 1)",
    )
    group.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="give each of these GPUs whole experts, instead of parts of all",
    )
    group.add_argument(
        "--collectives",
        metavar="KIND",
        help="how they exchange sums: auto (the default), nccl, or graph (see docs/parallel.md)",
    )
    group.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="compile only the target's first N layers, which is faster: figures of a layer "
        "hold, the step's figures describe the small model",
    )
    group.add_argument(
        "--resources",
        action="store_true",
        help="show registers, spills and shared memory of each Pallas kernel, from ptxas",
    )
