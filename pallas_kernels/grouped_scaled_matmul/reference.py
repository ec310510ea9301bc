"""The grouped scaled product in plain JAX: one scaled product per block of rows of a group."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.reference import from_to, products_of_blocks
from pallas_kernels.scaled_matmul.reference import scaled_matmul_reference


def grouped_scaled_matmul_reference(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    group_sizes: jax.Array,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
    *,
    block: tuple[int, int],
) -> jax.Array:
    """Compute `grouped_scaled_matmul` in plain JAX.

    Matrices of groups with rows are dequantised one at a time. Other matrices are not dequantised.
    """

    def multiply(rows: jax.Array, group: jax.Array) -> jax.Array:
        own = values[group], scales[group]
        return scaled_matmul_reference(rows, *own, block, jnp.float32, 0)

    return from_to(
        sources,
        targets,
        x,
        lambda x: products_of_blocks(x, group_sizes, values.shape[1], multiply),
    )
