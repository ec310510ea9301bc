"""The product of each row with its group's matrix, for a mixture of experts.

    out[targets[n]] = x[sources[n]] @ weights[g(n)]

where n runs over rows sorted by group: the first group_sizes[0] rows belong to group 0, and so on.
Without `sources`, the rows of x are in this order. Without `targets`, the rows of the result are in
this order.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_matmul.triton import grouped_matmul_triton

IMPLEMENTATIONS = {"triton": grouped_matmul_triton, "reference": grouped_matmul_reference}


def grouped_matmul(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
    *,
    kernels: str = "auto",
) -> jax.Array:
    """Multiply each row by its group's weights. Return [N, F] in x's dtype, summed in f32.

    Args:
        x: the rows [N, D], or [M, D] with `sources`.
        weights: [G, D, F], one matrix per group.
        group_sizes: i32[G], the numbers of rows per group. If their sum is less than N, the last
            rows have no group: they are not read, and their results are undefined.
        sources: i32[N], indices of rows of x, which may repeat; None if x is sorted by group.
        targets: i32[N], indices of rows of the result, a permutation; None if the result is sorted
            by group.
        kernels: implementation to use, see `dispatch.run`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    if x.ndim != 2 or weights.ndim != 3 or weights.shape[1] != x.shape[1]:
        raise ValueError(
            f"x must be [N, D] and weights [G, D, F]; got {x.shape} and {weights.shape}"
        )
    check_rows(x, weights.shape[0], group_sizes, sources, targets)
    given = x, weights, group_sizes, sources, targets
    return run("grouped_matmul", kernels, IMPLEMENTATIONS, *given)


def check_rows(
    x: jax.Array,
    num_groups: int,
    group_sizes: jax.Array,
    sources: jax.Array | None,
    targets: jax.Array | None,
) -> None:
    """Raise a ValueError if `group_sizes`, `sources` or `targets` has a wrong shape."""
    if group_sizes.shape != (num_groups,):
        raise ValueError(f"group_sizes must be [G={num_groups}]; got {group_sizes.shape}")
    num_rows = x.shape[0] if sources is None else sources.size
    for name, rows in ("sources", sources), ("targets", targets):
        if rows is not None and rows.shape != (num_rows,):
            raise ValueError(f"{name} must be [N={num_rows}]; got {rows.shape}")
