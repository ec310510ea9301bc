"""The products of each head's rows with the head's own matrix of 8-bit numbers.

    out[n, h, o] = sum_i x[n, h, i] values[h, o, i] scales[h, o // rows, i // columns]

Each block of `rows` x `columns` numbers of a matrix has one scale, as in `scaled_matmul`.
"""

import jax

from pallas_kernels.batched_scaled_matmul.reference import batched_scaled_matmul_reference
from pallas_kernels.batched_scaled_matmul.triton import batched_scaled_matmul_triton
from pallas_kernels.dispatch import run

IMPLEMENTATIONS = {
    "triton": batched_scaled_matmul_triton,
    "reference": batched_scaled_matmul_reference,
}


def batched_scaled_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    *,
    block: tuple[int, int],
    kernels: str = "auto",
) -> jax.Array:
    """Return the products [N, H, O] in x's dtype, accumulated in f32.

    Args:
        x: the rows of each head, [N, H, I].
        values: float8_e4m3fn[H, O, I] or int8[H, O, I].
        scales: f32[H, ceil(O / rows), ceil(I / columns)].
        block: the size of a block, (rows, columns).
        kernels: implementation to use, see `dispatch.run`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    is_fitting = x.ndim == values.ndim == 3 and (len(values), values.shape[2]) == x.shape[1:]
    if not is_fitting:
        raise ValueError(
            f"x must be [N, H, I] and values [H, O, I]; got {x.shape} and {values.shape}"
        )
    sizes = zip(values.shape[1:], block, strict=True)
    expected = len(values), *(-(-size // side) for size, side in sizes)
    if scales.shape != expected:
        raise ValueError(f"scales must be {expected} for blocks of {block}; got {scales.shape}")
    given = x, values, scales
    return run("batched_scaled_matmul", kernels, IMPLEMENTATIONS, *given, block=block)
