"""Matrices of 4-bit floats: NVFP4 (groups of 16 inputs) and MXFP4 (groups of 32 inputs).

A tensor u8[O, I / 2] has two codes per byte, the first in the lower bits. The scales are

    NVFP4    float8[O, groups], times one factor for the whole matrix
    MXFP4    powers of two, stored as u8[O, groups]: the exponents plus 127

Checkpoints of compressed-tensors store the reciprocal of NVFP4's factor.
"""

from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.checkpoint.quantised.format import check_axes, check_shape
from specjax.checkpoint.quantised.packed import PackedTensor, Unpacking, nibbles
from specjax.checkpoint.spec import module_of
from specjax.checkpoint.stored_tensor import Readable


def _transposed(scales: Any) -> Any:
    return scales.T


def _powers(exponents: Any) -> Any:
    powers = exponents.T.astype(np.int32) - 127
    return module_of(powers).ldexp(np.float32(1), powers).astype(ml_dtypes.bfloat16)


def _reciprocal(factor: np.ndarray) -> np.ndarray:
    return np.float32(1) / factor


_codes = partial(nibbles, axis=1, order=(0, 1))
_AXES = (0, 1), (1, 2)
NVFP4 = Unpacking(_codes, _transposed, is_float=True, axes=_AXES)
NVFP4_RECIPROCAL = NVFP4._replace(factor=_reciprocal)
MXFP4 = Unpacking(_codes, _powers, is_float=True, scales_dtype="bfloat16", axes=_AXES)
GROUPS = {NVFP4: 16, NVFP4_RECIPROCAL: 16, MXFP4: 32}


def fp4_tensor(
    folder: Path,
    name: str,
    words: Readable,
    scales: tuple[str, Readable],
    factor: tuple[str, Readable] | None,
    unpack: Unpacking,
    dtype: np.dtype,
) -> PackedTensor:
    """Return the matrix of 4-bit floats in the tensor `name`; see `PackedTensor`.

    `words` is this tensor. `scales` and `factor` are pairs of a name and a tensor. `factor` is None
    for formats without a factor.

    Raises:
        CheckpointError: a tensor has a wrong shape; the error names it.
    """
    check_axes(folder, name, words)
    (num_out, width), group = words.shape, GROUPS[unpack]
    about = f"{name} {list(words.shape)}"
    check_shape(folder, scales[0], about, scales[1], (num_out, -(-2 * width // group)))
    if factor is not None:
        check_shape(folder, factor[0], about, factor[1], (1,), ())
    own = words, scales[1], None, None, scales[0], ""
    factors = (None, "") if factor is None else (factor[1], factor[0])
    return PackedTensor(*own, unpack, (num_out, 2 * width), group, dtype, *factors)
