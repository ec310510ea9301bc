"""The nearest 4-bit numbers of matrices, with the scales and zero points of their groups."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.checkpoint.quantised.bits import BITS
from specjax.checkpoint.quantised.nearest import from_blocks, in_blocks, nearest

# The numbers of E2M1 have these middles. The second value of a pair says whether a number in the
# middle is rounded up, as it is if the code of the larger number is even.
_MIDDLES = (
    *((0.25, False), (0.75, True), (1.25, False), (1.75, True)),
    *((2.5, False), (3.5, True), (5.0, False)),
)
_E2M1_MAX, _E2M1_EXPONENT = 6.0, 2  # the largest number, and its exponent
_E4M3_MAX = 448.0


class Nearest4(NamedTuple):
    """A matrix [O, I] as 4-bit codes. `packed` explains the numbers, scales and zero points."""

    codes: jax.Array  # u8[O, I]
    scales: jax.Array  # [O, groups]
    zeros: jax.Array | None = None  # u8[O, groups]
    factors: jax.Array | None = None  # f32[O]


def nearest_integers(
    matrix: jax.Array, group: int, scales_dtype: str, *, has_zeros: bool
) -> Nearest4:
    """Return a matrix [O, I] as integers with a scale per `group` inputs.

    With zero points, the range of a group includes 0 and ends at its smallest and largest weight.
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

    With factors, this is NVFP4, with a factor per output. Without factors, it is MXFP4, whose
    scales are powers of two, or their exponents plus 127 if `scales_dtype` is uint8.
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
    by = jnp.where(by == 0, jnp.inf, by)  # weights with a scale of 0 are 0
    codes = _nearest_e2m1(wide / by[:, None, :, None])
    return Nearest4(from_blocks(codes, matrix.shape), scales, None, factors)


def _nearest_e2m1(numbers: jax.Array) -> jax.Array:
    """Return the codes u8 of the nearest E2M1 floats. A number in the middle goes to even."""
    size = jnp.abs(numbers)
    passed = [size >= x if goes_up else size > x for x, goes_up in _MIDDLES]
    code = jnp.stack(passed).sum(axis=0).astype(jnp.uint8)
    return code | (jnp.signbit(numbers).astype(jnp.uint8) << 3)


def _shared_exponents(blocks: jax.Array) -> jax.Array:
    """Return the exponents i32[O, groups] of MXFP4's scales for blocks [O, 1, groups, group].

    The largest weight of a group then has the exponent of the largest E2M1 float (OCP Microscaling
    Formats 1.0, section 6.3).
    """
    _, exponents = jnp.frexp(jnp.abs(blocks).max((1, 3)))  # of a number in [0.5, 1)
    return jnp.clip(exponents - 1 - _E2M1_EXPONENT, -126, 127)
