"""The product with a matrix of 8-bit numbers that have a scale per block.

    out[n, o] = sum_i x[n, i] values[o, i] scales[o // rows, i // columns]

where a block has `rows` x `columns` numbers, as in checkpoints of DeepSeek and Qwen (128 x 128). A
matrix with one scale per output has blocks of 1 x I. The matrix is stored as in checkpoints,
[O, I]. Numbers with adjacent i are then adjacent in memory, as a tensor core needs them: each of
its input registers holds several numbers with adjacent i.
"""

from typing import Any

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.scaled_matmul.reference import scaled_matmul_reference
from pallas_kernels.scaled_matmul.triton import scaled_matmul_triton

IMPLEMENTATIONS = {"triton": scaled_matmul_triton, "reference": scaled_matmul_reference}


def scaled_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    block: tuple[int, int],
    dtype: Any = None,
    first: int = 0,
    *,
    kernels: str = "auto",
) -> jax.Array:
    """Return the products [N, O - first], accumulated in f32.

    Args:
        x: the rows to multiply, [N, I].
        values: float8_e4m3fn[O, I] or int8[O, I].
        scales: f32[ceil(O / rows), ceil(I / columns)].
        block: the size of a block, (rows, columns).
        dtype: dtype of the products; None for x's dtype.
        first: the first output to compute.
        kernels: implementation to use, see `dispatch.run`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    if x.ndim != 2 or values.ndim != 2 or values.shape[1] != x.shape[1]:
        raise ValueError(f"x must be [N, I] and values [O, I]; got {x.shape} and {values.shape}")
    expected = tuple(-(-size // side) for size, side in zip(values.shape, block, strict=True))
    if scales.shape != expected:
        raise ValueError(f"scales must be {expected} for blocks of {block}; got {scales.shape}")
    given = x, values, scales, block, dtype or x.dtype, first
    return run("scaled_matmul", kernels, IMPLEMENTATIONS, *given)
