"""The product with packed numbers in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.packed_matmul.four_bits import FourBits, powers
from pallas_kernels.quantisation import widened_after


def packed_matmul_reference(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    factors: jax.Array | None,
    form: FourBits,
    dtype: Any,
    first: int,
) -> jax.Array:
    """See `packed_matmul`."""
    codes = widened_after(x, values, values.dtype)
    given = codes, scales, zeros, factors, form, x.shape[1], x.dtype
    matrix = unpacked(*given)[first:]
    y = jnp.einsum("ni,oi->no", x, matrix, preferred_element_type=jnp.float32)
    return y.astype(dtype)


def unpacked(
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    factors: jax.Array | None,
    form: FourBits,
    depth: int,
    dtype: Any,
) -> jax.Array:
    """Return the dequantised matrices [..., O, depth] in `dtype`, computed in f32."""

    def by_input(x: jax.Array) -> jax.Array:
        wide = jnp.repeat(x.astype(jnp.float32), form.group, axis=-2)
        return wide[..., :depth, :].swapaxes(-1, -2)

    numbers = form.numbers(values, depth)
    if zeros is not None:
        numbers = numbers - (by_input(zeros) - 8)
    matrix = numbers * by_input(powers(scales) if scales.dtype == jnp.uint8 else scales)
    return (matrix if factors is None else matrix * factors[..., None]).astype(dtype)
