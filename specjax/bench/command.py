"""The arguments of `specjax bench`. Imports nothing heavy, so that help is instant."""

import argparse

from specjax.arguments import MODEL_HELP
from specjax.config import DTYPES, METHODS
from specjax.demo import DRAFTERS, TARGET

DESCRIPTION = "Measure what speculation gains on real prompts."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `specjax.bench.speculation.run` reads."""
    parser.add_argument("--model", default=TARGET, help=f"{MODEL_HELP}; the default")
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="METHOD=CHECKPOINT",
        help=f"may be repeated; METHOD is one of {', '.join(METHODS)}; mtp alone means the model's "
        f"own module, and ngram is always alone; the demos {', '.join(DRAFTERS)} bring theirs",
    )
    parser.add_argument(
        "--k", default="1,2,3,5", metavar="K,K", help="drafts per step; default: %(default)s"
    )
    parser.add_argument("--batch-size", type=int, default=1, help="prompts that decode together")
    parser.add_argument("--num-prompts", type=int, help="default: as many as ship, 24")
    parser.add_argument("--max-tokens", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--max-model-len", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1, help="passes over the prompts")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="also write the JSON to a file")
