"""The product with a matrix of 4-bit numbers that have a scale per group of inputs.

    out[n, o] = sum_i x[n, i] (numbers[o, i] - zeros[i / group, o]) scales[i / group, o]

where a number is from 0 to 15; without zeros, 8 is subtracted. Two numbers share a byte. The inputs
are divided into runs of 2 H, where H is `half(group)`: byte j of a run has the numbers of inputs j
(in the lower bits) and j + H. So the lower halves of a run's bytes are numbers of adjacent inputs
in one group, and so are the upper halves. The last run is padded.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import run
from pallas_kernels.packed_matmul.reference import packed_matmul_reference
from pallas_kernels.packed_matmul.triton import MAX_HALF, packed_matmul_triton

IMPLEMENTATIONS = {"triton": packed_matmul_triton, "reference": packed_matmul_reference}


def half(group: int) -> int:
    """Return the number H of bytes in a run, for groups of `group` inputs."""
    return math.gcd(group, MAX_HALF)


def packed_width(depth: int, half: int) -> int:
    """Return the number of bytes for `depth` inputs, in runs of `half` bytes."""
    return -(-depth // (2 * half)) * half


def pack(numbers: jax.Array, half: int) -> jax.Array:
    """Return u8[..., bytes] from numbers u8[..., I] from 0 to 15, in runs of `half` bytes."""
    *others, depth = numbers.shape
    width = packed_width(depth, half)
    padding = [(0, 0)] * len(others) + [(0, 2 * width - depth)]
    runs = jnp.pad(numbers, padding).reshape(*others, -1, 2, half)
    return (runs[..., 0, :] | (runs[..., 1, :] << 4)).reshape(*others, width)


def packed_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    group: int,
    dtype: Any = None,
    first: int = 0,
    *,
    kernels: str = "auto",
) -> jax.Array:
    """Return the products [N, O - first], accumulated in f32.

    Args:
        x: the rows to multiply, [N, I].
        values: u8[O, bytes], as `pack` returns them.
        scales: f[ceil(I / group), O].
        zeros: u8[ceil(I / group), O]; None if they are all 8.
        group: the number of inputs that share a scale.
        dtype: dtype of the products; None for x's dtype.
        first: the first output to compute.
        kernels: implementation to use, see `dispatch.run`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    if x.ndim != 2 or values.ndim != 2:
        raise ValueError(
            f"x must be [N, I] and values [O, bytes]; got {x.shape} and {values.shape}"
        )
    depth, size = x.shape[1], half(group)
    if values.shape[1] != packed_width(depth, size):
        raise ValueError(
            f"values must have {packed_width(depth, size)} bytes for each output, for {depth} "
            f"inputs in groups of {group}; got {values.shape}"
        )
    expected = -(-depth // group), len(values)
    for name, given in ("scales", scales), ("zeros", zeros):
        if given is not None and given.shape != expected:
            raise ValueError(f"{name} must be {expected} for groups of {group}; got {given.shape}")
    given = x, values, scales, zeros, group, size, dtype or x.dtype, first
    return run("packed_matmul", kernels, IMPLEMENTATIONS, *given)
