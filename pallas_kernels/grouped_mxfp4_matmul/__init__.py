"""The product of each row with its group's matrix in MXFP4 (OCP Microscaling, 2023).

    out[targets[n], o] = sum_i x[sources[n], i] matrix[g, o, i]
    matrix[g, o, i] = numbers[g, o, i] 2^(exponents[g, i // 32, o] - 127)

where g is the group of row n. `grouped_matmul` explains groups, sources and targets. A number is a
float of 4 bits (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4, 6 or the negative of one of these.

Two numbers share a byte. The inputs are divided into runs of 64. Byte j of a run has the number of
its input j in the lower bits, and the number of its input j + 32 in the upper bits. The last run is
padded if it has only 32 inputs.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.grouped_matmul import check_rows
from pallas_kernels.grouped_mxfp4_matmul.reference import BLOCK, grouped_mxfp4_matmul_reference
from pallas_kernels.grouped_mxfp4_matmul.triton import grouped_mxfp4_matmul_triton

IMPLEMENTATIONS = {
    "triton": grouped_mxfp4_matmul_triton,
    "reference": grouped_mxfp4_matmul_reference,
}


def grouped_mxfp4_matmul(
    x: jax.Array,
    values: jax.Array,
    exponents: jax.Array,
    group_sizes: jax.Array,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
    *,
    kernels: str = "auto",
) -> jax.Array:
    """Return the products [N, O] in x's dtype, accumulated in f32.

    Args:
        x: the rows [N, I], or [M, I] with `sources`; I is a multiple of 32.
        values: u8[G, O, 32 ceil(I / 64)], two numbers in a byte.
        exponents: u8[G, I / 32, O], the exponents of the scales plus 127.
        group_sizes: i32[G]; see `grouped_matmul`, which also explains `sources` and `targets`.
        kernels: implementation to use, see `dispatch.run`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    if x.ndim != 2 or x.shape[1] % BLOCK or values.ndim != 3:
        raise ValueError(
            f"x must be [N, a multiple of {BLOCK}] and values [G, O, bytes]; "
            f"got {x.shape} and {values.shape}"
        )
    (num_groups, num_columns, width), depth = values.shape, x.shape[1]
    if width != BLOCK * -(-depth // (2 * BLOCK)):
        raise ValueError(f"values must be [G, O, 32 ceil({depth} / 64)]; got {values.shape}")
    expected = num_groups, depth // BLOCK, num_columns
    if exponents.shape != expected:
        raise ValueError(f"exponents must be [G, I / 32, O] = {expected}; got {exponents.shape}")
    check_rows(x, num_groups, group_sizes, sources, targets)
    given = x, values, exponents, group_sizes, sources, targets
    return run("grouped_mxfp4_matmul", kernels, IMPLEMENTATIONS, *given)
