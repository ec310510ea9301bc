"""Rounds matrices to 4-bit numbers, and computes the scale and zero point of each group."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.checkpoint.quantised.bits import BITS
from specjax.checkpoint.quantised.nearest import from_blocks, in_blocks, nearest

# The midpoints between neighbouring E2M1 floats. The second value of a pair says whether a number
# at the midpoint is rounded up. It is rounded to the float with the even code.
_MIDDLES = (
    *((0.25, False), (0.75, True), (1.25, False), (1.75, True)),
    *((2.5, False), (3.5, True), (5.0, False)),
)
_E2M1_MAX, _E2M1_EXPONENT = 6.0, 2  # the largest float, and its exponent
_E4M3_MAX = 448.0


class Nearest4(NamedTuple):
    """A matrix [O, I] as 4-bit codes. The module `packed` explains the fields."""

    codes: jax.Array  # u8[O, I]
    scales: jax.Array  # [O, groups]
    zeros: jax.Array | None = None  # u8[O, groups]
    factors: jax.Array | None = None  # f32[O]


def nearest_integers(
    matrix: jax.Array, group: int, scales_dtype: str, *, has_zeros: bool
) -> Nearest4:
    """Return a matrix [O, I] as integers with a scale per `group` inputs.

    With zero points, the 16 codes of a group cover the range from its smallest to its largest
    weight, extended to include 0. Without zero points, the range is symmetric.
    """
    if not has_zeros:
        numbers, scales = nearest(matrix, (1, group), BITS["int4"], scales_dtype)
        return Nearest4((numbers + 8).astype(jnp.uint8), scales)
    wide = in_blocks(matrix.astype(jnp.float32), (1, group))
    low, high = (jnp.minimum(wide.min((1, 3)), 0), jnp.maximum(wide.max((1, 3)), 0))
    scales = ((high - low) / 15).astype(scales_dtype)
    scales = jnp.where(scales == 0, jnp.ones_like(scales), scales)
    by = scales.astype(jnp.float32)
    zeros = jnp.clip(jnp.round(-low / by), 0, 15)
    codes = jnp.round(wide / by[:, None, :, None]) + zeros[:, None, :, None]
    codes = jnp.clip(codes, 0, 15).astype(jnp.uint8)
    return Nearest4(from_blocks(codes, matrix.shape), scales, zeros.astype(jnp.uint8))


def nearest_floats(
    matrix: jax.Array, group: int, scales_dtype: str, *, has_factors: bool
) -> Nearest4:
    """Return a matrix [O, I] as E2M1 floats with a scale per `group` inputs.

    With factors, the format is NVFP4, with one factor per output. Without factors, it is MXFP4,
    whose scales are powers of two. If `scales_dtype` is uint8, the scale 2^e is stored as e + 127.
    """
    wide = in_blocks(matrix.astype(jnp.float32), (1, group))
    factors = None
    if has_factors:
        largest = jnp.abs(wide).max((1, 3))
        factors = largest.max(axis=1) / (_E2M1_MAX * _E4M3_MAX)
        factors = jnp.where(factors == 0, jnp.ones_like(factors), factors)
        scales = jnp.minimum(largest / _E2M1_MAX / factors[:, None], _E4M3_MAX)
        scales = scales.astype(scales_dtype)
        by = scales.astype(jnp.float32) * factors[:, None]
    else:
        exponents = _shared_exponents(wide)
        by = jnp.ldexp(jnp.float32(1), exponents)
        scales = (exponents + 127 if scales_dtype == "uint8" else by).astype(scales_dtype)
    by = jnp.where(by == 0, jnp.inf, by)  # if a scale is 0, its weights become 0
    codes = _nearest_e2m1(wide / by[:, None, :, None])
    return Nearest4(from_blocks(codes, matrix.shape), scales, None, factors)


def _nearest_e2m1(numbers: jax.Array) -> jax.Array:
    """Return the codes u8 of the nearest E2M1 floats. At a midpoint, the even code is returned."""
    size = jnp.abs(numbers)
    passed = [size >= x if goes_up else size > x for x, goes_up in _MIDDLES]
    code = jnp.stack(passed).sum(axis=0).astype(jnp.uint8)
    return code | (jnp.signbit(numbers).astype(jnp.uint8) << 3)


def _shared_exponents(blocks: jax.Array) -> jax.Array:
    """Return the exponents i32[O, groups] of MXFP4's scales for blocks [O, 1, groups, group].

    After division by its scale, a group's largest weight has the exponent of the largest E2M1 float
    (OCP Microscaling Formats 1.0, section 6.3).
    """
    _, exponents = jnp.frexp(jnp.abs(blocks).max((1, 3)))  # x = m 2^e, with m in [0.5, 1)
    return jnp.clip(exponents - 1 - _E2M1_EXPONENT, -126, 127)
