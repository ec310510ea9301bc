"""The product of each row with its group's matrix of 8-bit numbers that have a scale per block.

    out[targets[n], o] = sum_i x[sources[n], i] matrix[g, o, i]
    matrix[g, o, i] = values[g, o, i] scales[g, o // rows, i // columns]

where g is the group of row n. `grouped_matmul` explains groups, sources and targets, and
`scaled_matmul` explains blocks.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.grouped_matmul import check_rows
from pallas_kernels.grouped_scaled_matmul.reference import grouped_scaled_matmul_reference
from pallas_kernels.grouped_scaled_matmul.triton import grouped_scaled_matmul_triton

IMPLEMENTATIONS = {
    "triton": grouped_scaled_matmul_triton,
    "reference": grouped_scaled_matmul_reference,
}


def grouped_scaled_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    group_sizes: jax.Array,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
    *,
    block: tuple[int, int],
    kernels: str = "auto",
) -> jax.Array:
    """Return the products [N, O] in x's dtype, accumulated in f32.

    Args:
        x: the rows [N, I], or [M, I] with `sources`.
        values: float8_e4m3fn[G, O, I] or int8[G, O, I].
        scales: f32[G, ceil(O / rows), ceil(I / columns)].
        group_sizes: i32[G]; see `grouped_matmul`, which also explains `sources` and `targets`.
        block: the size of a block, (rows, columns).
        kernels: implementation to use, see `dispatch.run`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    if x.ndim != 2 or values.ndim != 3 or values.shape[2] != x.shape[1]:
        raise ValueError(f"x must be [N, I] and values [G, O, I]; got {x.shape} and {values.shape}")
    sizes = zip(values.shape[1:], block, strict=True)
    expected = len(values), *(-(-size // side) for size, side in sizes)
    if scales.shape != expected:
        raise ValueError(f"scales must be {expected} for blocks of {block}; got {scales.shape}")
    check_rows(x, len(values), group_sizes, sources, targets)
    given = x, values, scales, group_sizes, sources, targets
    return run("grouped_scaled_matmul", kernels, IMPLEMENTATIONS, *given, block=block)
