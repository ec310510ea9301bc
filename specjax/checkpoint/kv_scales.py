"""Reads the scales of keys and values that checkpoints have for 8-bit caches.

Each layer has one scale of keys and one of values. Tools store them under different names, which
begin with the name of the layer's attention. A scale that the checkpoint lacks is 1.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles

# The names of scales start with the name of a layer's attention, and end like this. {0} is k for
# keys, and v for values. The last name, in older exports, is one scale for both.
_NAMES = (
    "{0}_proj.{0}_scale",
    "{0}_proj.output_scale",
    "qkv_proj.{0}_scale",
    "attn.{0}_scale",
    "{0}_scale",
    "kv_scale",
)
_ENDINGS = ".q_scale", ".k_scale", ".v_scale", ".kv_scale"


class KVScales(NamedTuple):
    """The scales of a layer's keys and values."""

    k: float = 1.0
    v: float = 1.0


def is_kv_scale(name: str) -> bool:
    """Return whether the tensor `name` is a scale for 8-bit caches, and not part of a weight."""
    return name.endswith(_ENDINGS)


def read_kv_scales(
    files: TensorFiles, attentions: Iterable[str], rename: Callable[[str], str]
) -> tuple[KVScales, ...]:
    """Return the scales of each layer, in the order of `attentions`; () if there are no scales.

    Args:
        files: all tensors of a checkpoint.
        attentions: the name prefix of each layer's attention.
        rename: a function that maps a tensor's usual name to its name in the files.

    Raises:
        CheckpointError: a scale is not one positive number. The message names the tensor.
    """
    found, there = [], files.names()
    for attention in attentions:
        scales = {}
        for part in KVScales._fields:
            names = (rename(f"{attention}.{name.format(part)}") for name in _NAMES)
            if (name := next(filter(there.__contains__, names), None)) is not None:
                scales[part] = _read(files, name)
        found.append(scales)
    return tuple(KVScales(**scales) for scales in found) if any(found) else ()


def _read(files: TensorFiles, name: str) -> float:
    shape = files.shape(name)
    if math.prod(shape) != 1:
        raise CheckpointError(
            f"{files.folder}: {name} must be one number, the scale of a layer's keys or values; it "
            f"has shape {list(shape)}"
        )
    scale = float(np.asarray(files.read(name), np.float32).reshape(()))
    if not (math.isfinite(scale) and scale > 0):
        raise CheckpointError(
            f"{files.folder}: {name} is {scale}, and must be a positive number; download or export "
            "the checkpoint again, or choose another kv_cache_dtype"
        )
    return scale
