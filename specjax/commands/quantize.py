"""Runs `specjax quantize`: writes a copy of a checkpoint with its weights in 8 or 4 bits."""

import argparse
from pathlib import Path

from specjax.checkpoint.hub import resolve
from specjax.checkpoint.quantised.saving import check_empty, save_rounded
from specjax.checkpoint.save import copy_tokenizer
from specjax.device.models.registry import read_config, rounded_files


def run(args: argparse.Namespace) -> int:
    """Run `specjax quantize`. Print the largest relative error of any matrix."""
    source, folder = resolve(args.model), Path(args.out).expanduser()
    check_empty(folder)
    made = rounded_files(source, args.quantization)
    save_rounded(folder, made, read_config(source).fields, args.quantization)
    copy_tokenizer(source, folder)
    print(f"{folder}: {made.describe(args.quantization)}")
    return 0
