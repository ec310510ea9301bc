"""Conversion of numbers to the 8-bit formats of pages, in plain JAX and inside kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.page_formats import PageFormat, page_format


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
    if jnp.issubdtype(stored.dtype, jnp.integer):  # whose conversion drops the fraction
        x = jnp.where(x < 0, x - 0.5, x + 0.5)
    return x.astype(stored.dtype)


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
