"""The grouped product with MXFP4 in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.reference import from_to, products_of_blocks
from pallas_kernels.triton_call import e2m1

BLOCK = 32  # inputs that share a scale


def grouped_mxfp4_matmul_reference(
    x: jax.Array,
    values: jax.Array,
    exponents: jax.Array,
    group_sizes: jax.Array,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
) -> jax.Array:
    """See `grouped_mxfp4_matmul`. Matrices with rows are unpacked one at a time.

    Matrices without rows are not unpacked.
    """

    def multiply(rows: jax.Array, group: jax.Array) -> jax.Array:
        matrix = unpacked(values[group], exponents[group], x.dtype)
        return jnp.einsum("ni,oi->no", rows, matrix, preferred_element_type=jnp.float32)

    return from_to(
        sources,
        targets,
        x,
        lambda x: products_of_blocks(x, group_sizes, values.shape[1], multiply),
    )


def unpacked(values: jax.Array, exponents: jax.Array, dtype: Any) -> jax.Array:
    """Return the matrices [..., O, I], which are exact in bf16 and f32."""
    runs = values.reshape(*values.shape[:-1], -1, BLOCK)
    blocks = jnp.stack([runs & 15, runs >> 4], axis=-2)
    blocks = blocks.reshape(*values.shape[:-1], -1, BLOCK)[..., : exponents.shape[-2], :]
    powers = exponents.swapaxes(-1, -2).astype(jnp.int32)[..., None] - 127
    numbers = jnp.ldexp(e2m1(blocks.astype(jnp.uint32)), powers)
    return numbers.astype(dtype).reshape(*values.shape[:-1], -1)
