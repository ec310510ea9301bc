"""The product of each row with its group's matrix of 4-bit numbers.

    out[targets[n], o] = sum_i x[sources[n], i] matrix[g, o, i]

where g is the group of row n. `grouped_matmul` explains groups, sources and targets.
`packed_matmul` explains how a matrix is stored as packed numbers, scales, zero points and factors.
Here, each of these arrays has a leading axis of size G, with one matrix per group.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.grouped_matmul import check_rows
from pallas_kernels.grouped_packed_matmul.reference import grouped_packed_matmul_reference
from pallas_kernels.grouped_packed_matmul.triton import grouped_packed_matmul_triton
from pallas_kernels.packed_matmul import check_matrices
from pallas_kernels.packed_matmul.four_bits import FourBits

IMPLEMENTATIONS = {
    "triton": grouped_packed_matmul_triton,
    "reference": grouped_packed_matmul_reference,
}


def grouped_packed_matmul(
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
    kernels: str = "auto",
) -> jax.Array:
    """Multiply each row by its group's 4-bit weights. Return [N, O] in x's dtype, summed in f32.

    Args:
        x: the rows [N, I], or [M, I] with `sources`.
        values, scales, zeros, factors: as in `packed_matmul`, with a leading axis of size G.
        form: see `packed_matmul`.
        group_sizes: i32[G]; see `grouped_matmul`, which also explains `sources` and `targets`.
        kernels: implementation to use, see `dispatch.run`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    if x.ndim != 2 or values.ndim != 3:
        raise ValueError(
            f"x must be [N, I] and values [G, O, bytes]; got {x.shape} and {values.shape}"
        )
    check_matrices(x.shape[1], values, scales, zeros, factors, form)
    check_rows(x, len(values), group_sizes, sources, targets)
    given = x, values, scales, zeros, factors, group_sizes, sources, targets
    return run("grouped_packed_matmul", kernels, IMPLEMENTATIONS, *given, form=form)
