"""Chooses the weights of an unquantised checkpoint that are quantised while it is loaded."""

from typing import Any

import jax
import numpy as np

from specjax.checkpoint.division import DividedSpec
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.given import dotted
from specjax.checkpoint.quantised.bits import BITS
from specjax.checkpoint.quantised.rounding import RoundedFiles, round_matrices
from specjax.device.loading import keep_name
from specjax.device.weights.stored import STORED, unpacked
from specjax.device.weights.weight import is_weight

# Fields whose matrices stay plain: embeddings are only looked up, and the matrices that choose or
# weigh experts are small.
_PLAIN = {"embedding", "router", "shared_gate"}


def rounded(specs: Any, files: TensorFiles, quantization: str, dtype: np.dtype) -> RoundedFiles:
    """Return `files` as `RoundedFiles`: projections are quantised when they are read.

    A projection stays unquantised if its inputs cannot be divided into groups with one scale each,
    or if its class of weights has no form for the kind of numbers `quantization`. The division of a
    model over devices changes neither the choice of projections nor their quantised numbers.

    Args:
        specs: the model's `TensorSpec`s, with the names in `files`.
        quantization, dtype: see `round_matrices`.

    Raises:
        ValueError: no matrix can be quantised.
    """
    whole = jax.tree.map(lambda x: x.whole if isinstance(x, DividedSpec) else x, specs)
    made = round_matrices(files, projections(whole), quantization, dtype)
    made = made.without(unpacked(whole, made.files, keep_name), files)
    if not made.matrices:
        raise ValueError(
            f"quantization={quantization!r} changes no matrix of {files.folder}: experts stay "
            f"plain, and inputs must be a multiple of {BITS[quantization].group or 1}; choose "
            "another kind, or leave it out"
        )
    return made


def projections(specs: Any) -> list[str]:
    """Return the names of the tensors that can be quantised, given a model's `TensorSpec`s."""
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_weight)
    return [
        name
        for path, x in leaves
        if type(x) in STORED and _PLAIN.isdisjoint(dotted(path).split("."))
        for name in x.values.names
    ]
