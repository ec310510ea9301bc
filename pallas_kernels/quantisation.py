"""Conversion of numbers to and from 8-bit formats, in plain JAX and inside kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.page_formats import FP8, FP8_BYTES, PageFormat, page_format


def token_scales(x: jax.Array, stored: PageFormat) -> jax.Array:
    """Return a scale [...] for each vector of x f32[..., n].

    The scale is max |x| divided by the format's largest number, or 1 if the vector is zero.
    """
    largest = jnp.max(jnp.abs(x), axis=-1)
    return jnp.where(largest == 0, 1.0, largest / stored.largest)


def quantise(x: jax.Array, scales: jax.Array | float, stored: PageFormat) -> jax.Array:
    """Return x f32 divided by `scales`, rounded to the nearest number of the format.

    Quotients outside the format's range are clipped.
    """
    x = jnp.clip(x / scales, -stored.largest, stored.largest)
    if stored == FP8_BYTES:
        return jax.lax.bitcast_convert_type(x.astype(FP8.dtype), jnp.uint8)
    if jnp.issubdtype(stored.dtype, jnp.integer):  # whose conversion drops the fraction
        x = jnp.where(x < 0, x - 0.5, x + 0.5)
    return x.astype(stored.dtype)


def widened(numbers: jax.Array, dtype: Any) -> jax.Array:
    """Return the numbers in a pool as numbers of `dtype`, without multiplying by scales."""
    if numbers.dtype == FP8_BYTES.dtype:
        return float8_of(numbers).astype(dtype)
    return numbers.astype(dtype)


def float8_of(codes: jax.Array) -> jax.Array:
    """Return the float8_e4m3fn numbers with the bits `codes` u8, as f32.

    On a CPU, XLA's conversion from float8 would take twice as long.
    """
    code = codes.astype(jnp.int32)
    size = code & 0x7F  # four bits of exponent, three of mantissa
    normal = jax.lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    number = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    number = jnp.where(size == 0x7F, jnp.nan, number)
    return jnp.where(code > 0x7F, -number, number)


def widened_after(x: jax.Array, values: jax.Array, dtype: Any) -> jax.Array:
    """Return quantised `values` as numbers of `dtype`, to be multiplied by x.

    On a CPU, XLA would widen the matrices of all layers at the start of a program, in memory that
    is allocated for each call. That took four times as long as all products. So on a CPU, this
    function computes the result from `values` and x, although x does not change the result. XLA
    then widens a matrix only after x has been computed.
    """

    if not x.size:
        return values.astype(dtype)

    def on_cpu(x: jax.Array, values: jax.Array) -> jax.Array:
        is_float = values.dtype == jnp.float8_e4m3fn
        codes = jax.lax.bitcast_convert_type(values, jnp.uint8) if is_float else values
        first = jax.lax.bitcast_convert_type(x.ravel()[0].astype(jnp.float32), jnp.int32)
        is_known = (first | 1) != 0  # always true, but XLA does not know it
        codes = jnp.where(is_known, codes, jnp.zeros_like(codes))
        return (float8_of(codes) if is_float else codes).astype(dtype)

    return jax.lax.platform_dependent(
        x, values, cpu=on_cpu, default=lambda x, values: values.astype(dtype)
    )


def zero_of(dtype: Any) -> float | int:
    """Return the value of masked elements in arrays of `dtype`: 0.0 for floats, 0 for integers."""
    return 0.0 if jnp.issubdtype(dtype, jnp.floating) else 0


def as_stored(
    x: jax.Array, dtype: Any, layer_scales: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return x [..., n] as a pool of `dtype` stores it, and the scales of x's tokens.

    If the pool's format has scales of tokens, they are f32[...], and are computed from x. For other
    pools, the second result is None. If the format has scales of layers, x is divided by
    `layer_scales`, which can be broadcast to [...]. If `layer_scales` is None, x is not divided.
    """
    stored = page_format(dtype)
    if stored is None:
        return x.astype(dtype), None
    x = x.astype(jnp.float32)
    if stored.has_token_scales:
        made = token_scales(x, stored)
        return quantise(x, made[..., None], stored), made
    if layer_scales is None:
        return quantise(x, 1.0, stored), None
    return quantise(x, jax.lax.broadcast_to_rank(layer_scales[..., None], x.ndim), stored), None
