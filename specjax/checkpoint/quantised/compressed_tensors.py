"""Weights of compressed-tensors: 8-bit floats and integers, packed integers, and 4-bit floats.

A matrix of packed integers has these tensors instead of X.weight:

    X.weight_packed        i32 words. Each packs adjacent inputs: eight 4-bit numbers, stored
                           plus 8, or four 8-bit numbers, stored plus 128
    X.weight_shape         the shape [O, I]
    X.weight_scale         the scales [O, groups], or one scale
    X.weight_zero_point    optional: the zero points plus 8, packed along the outputs
    X.weight_g_idx         optional: the group of each input

For 4-bit floats, X.weight_packed holds bytes (see `fp4`). Names, dtypes and shapes of the tensors
show how they are quantised. To load weights, only the block size of float8 weights is taken from
the config. The config is also checked for settings that are not supported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeGuard

import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.compressed_parts import stored_parts
from specjax.checkpoint.quantised.described import Described, is_named, of_config
from specjax.checkpoint.quantised.format import (
    Converted,
    check_axes,
    check_shape,
    group_size,
    take,
)
from specjax.checkpoint.quantised.fp4 import MXFP4, NVFP4_RECIPROCAL, fp4_tensor
from specjax.checkpoint.quantised.fp8 import one_block
from specjax.checkpoint.quantised.packed import PackedTensor, Unpacking, nibbles
from specjax.checkpoint.quantised.scaled import Block, ScaledTensor, with_scales
from specjax.checkpoint.stored_tensor import Readable

UNPACKING = Unpacking(
    codes=lambda words: nibbles(words, 1),
    scales=lambda scales: jnp.atleast_2d(scales).T,
    zeros=lambda words: nibbles(words, 0).T,
)
_END = ".weight_packed"


@dataclass(frozen=True)
class CompressedTensors:
    """The `Format` of compressed-tensors.

    Activations keep their dtype, even if the config quantises them.
    """

    described: ClassVar[str] = (
        "compressed-tensors with 8-bit floats (tensor, channel, block), integers of 4 or 8 bits "
        "(tensor, channel, group), NVFP4 or MXFP4"
    )
    block: Block | None  # of float8 weights
    config: Mapping[str, Any] = field(default_factory=dict)  # which matrices are quantised, and how

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self | None:
        """See `Format`."""
        match config:
            case {"quant_method": "compressed-tensors", "config_groups": {**groups}, **others}:
                given = [one.get("weights") for one in groups.values() if isinstance(one, Mapping)]
                found = [one for one in given if _is_supported(one)]
                sparsity = others.get("sparsity_config")
                is_dense = not isinstance(sparsity, Mapping) or sparsity.get("format") == "dense"
                if not (is_dense and found and len(found) == len(given)):
                    return None
                block = one_block([one.get("block_structure") for one in found])
                return None if block is False else cls(block, config)
        return None

    def join(self, files: TensorFiles, dtype: np.dtype) -> TensorFiles:
        """See `Format`."""
        tensors = dict(files.tensors)
        for name in files.names():
            if name.endswith(_END):
                plain = name.removesuffix("_packed")
                read = _floats if files.dtype(name) == np.uint8 else _integers
                tensors[plain] = read(files.folder, tensors, plain, np.dtype(dtype))
        files = _without_zero_points(replace(files, tensors=tensors))
        return with_scales(files, self.block, dtype)

    def stored(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype
    ) -> dict[str, Described] | None:
        """See `Format`."""
        if is_named(name, of_config(self.config, "ignore")):
            return None
        for group in self.config.get("config_groups", {}).values():
            targets = of_config(group, "targets")
            if "Linear" in targets or is_named(name, targets):
                kind = group.get("format") or self.config.get("format")
                made = stored_parts(group["weights"], kind, shape, dtype)
                return made and {name + end: part for end, part in made.items()}
        return None


def _is_supported(weights: Any) -> TypeGuard[Mapping[str, Any]]:
    match weights:
        case {"type": "float", "num_bits": 8, "strategy": "tensor" | "channel" | "block", **others}:
            return others.get("symmetric", True) is True
        case {"type": "int", "num_bits": 4 | 8, "strategy": "tensor" | "channel" | "group"}:
            return True
        case {"type": "float", "num_bits": 4, "group_size": 16 | 32, **others}:
            return others.get("symmetric", True) is True
    return False


def _floats(
    folder: Path, tensors: dict[str, Readable], plain: str, dtype: np.dtype
) -> PackedTensor:
    """Return the matrix of 4-bit floats named `plain`.

    The tensors that store the matrix are removed from `tensors`.
    """
    packed, scale, named = (f"{plain}_{end}" for end in ("packed", "scale", "global_scale"))
    words, scales = tensors.pop(packed), take(tensors, folder, scale, packed)
    tensors.pop(plain.removesuffix("weight") + "input_global_scale", None)
    factor, unpack = None, MXFP4
    if scales.dtype != np.uint8:
        factor, unpack = (named, take(tensors, folder, named, packed)), NVFP4_RECIPROCAL
    return fp4_tensor(folder, packed, words, (scale, scales), factor, unpack, dtype)


def _integers(
    folder: Path, tensors: dict[str, Readable], plain: str, dtype: np.dtype
) -> PackedTensor | ScaledTensor:
    """Return the matrix of packed 4-bit or 8-bit integers named `plain`.

    The tensors that store the matrix are removed from `tensors`.

    Raises:
        CheckpointError: a tensor is missing or has a wrong shape, or an 8-bit matrix has zero
            points or `g_idx`.
    """
    packed, scale, zero, order = (
        f"{plain}_{end}" for end in ("packed", "scale", "zero_point", "g_idx")
    )
    words, shape = tensors.pop(packed), take(tensors, folder, f"{plain}_shape", packed)
    scales = take(tensors, folder, scale, packed)
    zeros, groups = tensors.pop(zero, None), tensors.pop(order, None)
    check_axes(folder, packed, words)
    check_shape(folder, f"{plain}_shape", packed, shape, (2,))
    num_out, num_in = (int(size) for size in np.ravel(shape.read()))
    widths = {bits: -(-num_in * bits // 32) for bits in (4, 8)}
    about = f"{plain} {[num_out, num_in]}"
    check_shape(folder, packed, about, words, *((num_out, width) for width in widths.values()))
    count = scales.shape[1] if len(scales.shape) == 2 else 1
    group = group_size(num_in, count) or num_in
    count = -(-num_in // group)
    check_shape(folder, scale, about, scales, (num_out, count), (1,), ())
    if words.shape[1] != widths[4]:
        if zeros is not None or groups is not None:
            raise CheckpointError(
                f"{folder}: {packed} has 8-bit numbers with {zero} or {order}, which is not "
                "supported; symmetric numbers in consecutive groups are"
            )
        numbers = Converted(words, partial(_bytes, num_in), np.dtype(np.int8), (num_out, num_in))
        return ScaledTensor(numbers, scales, scale, (1, group), dtype)
    if zeros is not None:
        check_shape(folder, zero, about, zeros, (-(-num_out // 8), count))
    if groups is not None:
        check_shape(folder, order, about, groups, (num_in,))
    own = words, scales, zeros, groups, scale, order
    return PackedTensor(*own, UNPACKING, (num_out, num_in), group, dtype)


def _bytes(num_in: int, words: np.ndarray) -> np.ndarray:
    """Unpack i32 words of four 8-bit numbers, stored plus 128, to numbers i8[O, `num_in`]."""
    return (np.ascontiguousarray(words).view(np.uint8)[:, :num_in] ^ 0x80).view(np.int8)


def _without_zero_points(files: TensorFiles) -> TensorFiles:
    """Return `files` without the zero points of 8-bit integers. Refuse zero points other than 0."""
    tensors = dict(files.tensors)
    for name, tensor in files.tensors.items():
        if name.endswith(".weight_zero_point"):
            if np.any(tensor.read()):
                raise CheckpointError(
                    f"{tensor.path}: {name} is not 0; zero points of 8-bit numbers are not "
                    "supported"
                )
            del tensors[name]
    return replace(files, tensors=tensors)
