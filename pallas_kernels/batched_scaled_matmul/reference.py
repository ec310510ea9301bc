"""`batched_scaled_matmul` in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantisation import widened_after
from pallas_kernels.scaled_matmul.reference import dequantised


def batched_scaled_matmul_reference(
    x: jax.Array, values: jax.Array, scales: jax.Array, *, block: tuple[int, int]
) -> jax.Array:
    """See `batched_scaled_matmul`."""
    matrices = dequantised(widened_after(x, values, jnp.float32), scales, block, x.dtype)
    y = jnp.einsum("nhi,hoi->nho", x, matrices, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)
