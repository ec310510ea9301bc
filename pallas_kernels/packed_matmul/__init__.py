"""The product with a matrix of 4-bit numbers that have a scale per group of inputs.

    out[n, o] = factors[o] sum_i x[n, i] (numbers[o, i] - zeros[g, o]) scales[g, o]

where g = i // group. A number is an integer from 0 to 15, or a float (E2M1). `zeros` are zero
points. Without zero points, 8 is subtracted from integers, and nothing from floats, which never
have zero points. Without `factors`, all factors are 1.

The 4-bit codes of two numbers share a byte. The inputs are divided into runs of 2 H, where H is the
`half` of a `FourBits`. Byte j of a run has the code of its input j in the lower bits, and the code
of its input j + H in the upper bits. So the lower bits of a run's bytes belong to adjacent inputs
of one group, and so do the upper bits. The last run is padded.
"""

from typing import Any

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.packed_matmul.four_bits import FourBits
from pallas_kernels.packed_matmul.reference import packed_matmul_reference
from pallas_kernels.packed_matmul.triton import packed_matmul_triton

IMPLEMENTATIONS = {"triton": packed_matmul_triton, "reference": packed_matmul_reference}


def packed_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    factors: jax.Array | None,
    form: FourBits,
    dtype: Any = None,
    first: int = 0,
    *,
    kernels: str = "auto",
) -> jax.Array:
    """Return the products [N, O - first], accumulated in f32.

    Args:
        x: the rows to multiply, [N, I].
        values: u8[O, bytes], as `FourBits.pack` returns them.
        scales: f[groups, O]; or u8[groups, O], where e means a scale of 2^(e - 127).
        zeros: u8[groups, O], or None.
        factors: f32[O], or None.
        form: the size of groups, and the kind of numbers.
        dtype: dtype of the products; None for x's dtype.
        first: the first output to compute.
        kernels: implementation to use, see `dispatch.run`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    if x.ndim != 2 or values.ndim != 2:
        raise ValueError(
            f"x must be [N, I] and values [O, bytes]; got {x.shape} and {values.shape}"
        )
    check_matrices(x.shape[1], values, scales, zeros, factors, form)
    given = x, values, scales, zeros, factors, form, dtype or x.dtype, first
    return run("packed_matmul", kernels, IMPLEMENTATIONS, *given)


def check_matrices(
    depth: int,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    factors: jax.Array | None,
    form: FourBits,
) -> None:
    """Raise a ValueError unless the shapes of a matrix's arrays fit `depth` inputs.

    The arrays are the arguments of `packed_matmul`, possibly with further leading axes.
    """
    *others, num_out, width = values.shape
    if width != form.width(depth):
        raise ValueError(
            f"values must have {form.width(depth)} bytes for each output, for {depth} inputs in "
            f"groups of {form.group}; got {values.shape}"
        )
    groups = *others, form.num_groups(depth), num_out
    for name, given, shape in (
        ("scales", scales, groups),
        ("zeros", zeros, groups),
        ("factors", factors, (*others, num_out)),
    ):
        if given is not None and given.shape != shape:
            raise ValueError(
                f"{name} must be {shape} for groups of {form.group}; got {given.shape}"
            )
