"""The scaled product in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantisation import widened_after


def scaled_matmul_reference(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    block: tuple[int, int],
    dtype: Any,
    first: int,
) -> jax.Array:
    """See `scaled_matmul`."""
    if block[1] >= values.shape[1]:  # one scale per output, applied to the product
        of_outputs = by_number(scales, (len(values), 1), (block[0], 1))[first:]
        matrix = widened_after(x, values, x.dtype)[first:]
        return (_multiply(x, matrix) * of_outputs.T).astype(dtype)
    wide = widened_after(x, values, jnp.float32)
    return _multiply(x, dequantised(wide, scales, block, x.dtype)[first:]).astype(dtype)


def dequantised(
    values: jax.Array, scales: jax.Array, block: tuple[int, int], dtype: Any
) -> jax.Array:
    """Return the numbers times their scales, computed in f32."""
    return (values.astype(jnp.float32) * by_number(scales, values.shape, block)).astype(dtype)


def by_number(scales: jax.Array, shape: tuple[int, ...], block: tuple[int, int]) -> jax.Array:
    """Return the scale of each number of a matrix with this shape, as f32."""
    rows = jnp.repeat(scales.astype(jnp.float32), block[0], axis=-2)[..., : shape[-2], :]
    return jnp.repeat(rows, block[1], axis=-1)[..., : shape[-1]]


def _multiply(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("ni,oi->no", x, matrix, preferred_element_type=jnp.float32)
