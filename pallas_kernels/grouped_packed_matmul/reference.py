"""The grouped product with packed numbers in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.reference import from_to, products_of_blocks
from pallas_kernels.packed_matmul.four_bits import FourBits
from pallas_kernels.packed_matmul.reference import unpacked


def grouped_packed_matmul_reference(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    factors: jax.Array | None,
    group_sizes: jax.Array,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
    *,
    form: FourBits,
) -> jax.Array:
    """See `grouped_packed_matmul`.

    Matrices are unpacked one at a time. The matrix of a group without rows is not unpacked.
    """

    def multiply(rows: jax.Array, group: jax.Array) -> jax.Array:
        own_zeros, own_factors = (None if y is None else y[group] for y in (zeros, factors))
        own = values[group], scales[group], own_zeros, own_factors
        matrix = unpacked(*own, form, x.shape[1], x.dtype)
        return jnp.einsum("ni,oi->no", rows, matrix, preferred_element_type=jnp.float32)

    return from_to(
        sources,
        targets,
        x,
        lambda x: products_of_blocks(x, group_sizes, values.shape[1], multiply),
    )
