"""Lists the tensors in which compressed-tensors stores a matrix, according to its config."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.checkpoint.quantised.described import Described, tensor
from specjax.checkpoint.quantised.fp8 import one_block
from specjax.checkpoint.quantised.scaled import FLOAT8, num_blocks


def stored_parts(
    weights: Mapping[str, Any], kind: str | None, shape: tuple[int, ...], dtype: np.dtype
) -> dict[str, Described] | None:
    """Return the tensors that store a matrix, by the suffix that follows the matrix's name.

    The result is None if a matrix of this shape cannot be stored with these settings.

    Args:
        weights: the settings of the weights in a config group.
        kind: the field `format` of the group, or of the config if the group lacks this field.
        shape: the matrix's shape, [..., O, I].
        dtype: the dtype of the matrix before quantisation.
    """
    bits, is_float = weights["num_bits"], weights["type"] == "float"
    (num_out, num_in), block = shape[-2:], one_block([weights.get("block_structure")])
    group = weights.get("group_size") or 0
    if is_float and bits == 4:
        return _floats(shape, group)
    has_groups, has_blocks = (weights["strategy"] == name for name in ("group", "block"))
    if (has_groups and (group < 1 or num_in % group)) or (has_blocks and not block):
        return None
    count = num_in // group if has_groups else 1
    sizes = {"tensor": (1,), "channel": (num_out, 1), "group": (num_out, count)}
    if is_float or (bits == 8 and kind != "pack-quantized"):
        numbers = tensor(FLOAT8 if is_float else np.int8, *shape)
        if has_blocks:
            scales = num_blocks(shape, block)
        else:
            scales = *shape[:-2], *sizes[weights["strategy"]]
        return {"": numbers, "_scale": tensor(dtype, *scales)}
    if len(shape) != 2:
        return None
    made = {
        "_packed": tensor(np.int32, num_out, -(-num_in * bits // 32)),
        "_scale": tensor(dtype, *sizes[weights["strategy"]]),
        "_shape": tensor(np.int64, values=shape),
    }
    if not weights.get("symmetric", True):
        made["_zero_point"] = tensor(np.int32, -(-num_out * bits // 32), count)
    return made


def _floats(shape: tuple[int, ...], group: int) -> dict[str, Described] | None:
    """Return the tensors of a matrix of 4-bit floats; None if it cannot have this shape.

    The format is NVFP4 if groups have 16 inputs. Otherwise, it is MXFP4.
    """
    if len(shape) != 2 or shape[1] % group:
        return None
    num_out, num_in = shape
    packed = tensor(np.uint8, num_out, num_in // 2)
    if group != 16:
        return {"_packed": packed, "_scale": tensor(np.uint8, num_out, num_in // group)}
    scales = tensor(FLOAT8, num_out, num_in // group)
    return {"_packed": packed, "_scale": scales, "_global_scale": tensor(np.float32, 1)}
