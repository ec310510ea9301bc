"""Declares the arguments of `specjax train`.

This module imports nothing slow, so that --help is fast.
"""

import argparse
from pathlib import Path
from typing import Any

ARCHITECTURES = "llama", "qwen3_5", "glm4_moe_lite"  # keys of `train.target.DEMOS`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that `specjax.train.recipes.run` reads."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    text = "a small model and its tokenizer, from scratch"
    target = kinds.add_parser("target", help=text, allow_abbrev=False)
    target.add_argument("--architecture", choices=ARCHITECTURES, default="llama")
    target.add_argument("--vocab-size", type=int, default=2048, help="size of the BPE vocabulary")
    target.add_argument("--num-layers", type=int, default=12)
    target.add_argument("--hidden-size", type=int, default=384, help="a multiple of 64")
    _add_common(target, steps=950, batch_size=12, length=320, learning_rate=2e-3)

    text = "answers of the target, to train drafters on"
    answers = kinds.add_parser("answers", help=text, allow_abbrev=False)
    answers.add_argument("--target", type=Path, required=True, help=TARGET_HELP)
    answers.add_argument("--data", type=Path, nargs="+", required=True, help=DATA_HELP)
    answers.add_argument("--out", type=Path, required=True, help="the .jsonl to write")
    answers.add_argument("--num-prompts", type=int, default=2500)
    answers.add_argument("--max-tokens", type=int, default=160)
    answers.add_argument("--batch-size", type=int, default=32)
    answers.add_argument("--seed", type=int, default=0)

    for kind, text in DRAFTERS.items():
        drafter = kinds.add_parser(kind, help=text, allow_abbrev=False)
        drafter.add_argument("--target", type=Path, required=True, help=TARGET_HELP)
        drafter.add_argument("--init", type=Path, help=INIT_HELP)
        for name, options in SIZES.get(kind, {}).items():
            drafter.add_argument(name, type=int, **options)
        _add_common(drafter, steps=600, batch_size=16, length=256, learning_rate=2e-3)


DRAFTERS = {
    "eagle1": "an EAGLE-1 head for a target",
    "eagle3": "an EAGLE-3 head for a target",
    "mtp": "a hybrid target's own module; OUT is the target with it",
    "p_eagle": "a P-EAGLE head for a target",
    "dflash": "a DFlash head for a target",
    "dspark": "a DSpark head for a target",
    "medusa": "Medusa heads for a target",
}
AUX_LAYERS = {"nargs": "+", "help": "layers whose input the head reads; default: 2 L/2 L-3"}
UNROLLED = {"default": 4, "help": "steps of the training-time test"}
NUM_LAYERS = {"help": "default: 2"}
MASK = {"help": "a token that does not occur in texts; default: bos_token_id"}
# Options by kind of drafter. Sizes of a new head have no default, so that --init can refuse them.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "eagle3": {
        "--draft-vocab-size": {"help": "default: 1024"},
        "--aux-layers": AUX_LAYERS,
        "--num-unrolled": UNROLLED,
    },
    "mtp": {"--num-unrolled": UNROLLED},
    "p_eagle": {
        "--num-layers": NUM_LAYERS,
        "--draft-vocab-size": {"help": "default: 1024"},
        "--aux-layers": AUX_LAYERS,
        "--mask-token-id": MASK,
        "--num-unrolled": {"default": 4, "help": "drafts that are trained together"},
    },
    "dflash": {
        "--num-layers": NUM_LAYERS,
        "--block-size": {"help": "number of drafts plus one; default: 8"},
        "--aux-layers": AUX_LAYERS,
        "--mask-token-id": MASK,
    },
    "dspark": {
        "--num-layers": NUM_LAYERS,
        "--block-size": {"help": "number of drafts; default: 7"},
        "--markov-rank": {"help": "rank of the correction by the previous token; default: 256"},
        "--aux-layers": AUX_LAYERS,
        "--mask-token-id": MASK,
    },
    "medusa": {"--num-heads": {"help": "default: 3"}},
}
INIT_HELP = "a head to begin with, instead of a new one, as [METHOD=]CHECKPOINT"
TARGET_HELP = "the model's folder, or a demo like demo-llama"
DATA_HELP = ".jsonl (question + answer, text, or answers of the target), .txt, .py, or folders"


def _add_common(
    parser: argparse.ArgumentParser,
    *,
    steps: int,
    batch_size: int,
    length: int,
    learning_rate: float,
) -> None:
    parser.add_argument("--data", type=Path, nargs="+", required=True, help=DATA_HELP)
    parser.add_argument("--held-out", type=Path, nargs="+", help="data to report the result on")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--runs", type=Path, help="where training state is kept; default OUT.run")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="rows per step")
    parser.add_argument("--length", type=int, default=length, help="tokens per row")
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
