"""A projection of few rows, with what stands before and after it, in one launch.

    y = norm(x) weight      out = silu(y[:, :F]) y[:, F:]  if it is gated, or residual + y

For so few rows a projection takes as long as reading its weight. What XLA launches beside it, the
norm, the activation or the sum, takes little of the GPU and yet as long as a launch does.
"""

import jax

from pallas_kernels.dispatch import choose, run
from pallas_kernels.fused_linear.reference import Norm as Norm
from pallas_kernels.fused_linear.reference import fused_linear_reference
from pallas_kernels.fused_linear.triton import ALIGNMENT, DTYPES, MAX_ROWS, fused_linear_triton

IMPLEMENTATIONS = {"triton": fused_linear_triton, "reference": fused_linear_reference}
# An estimate: an H100 reads this much in 30 us, of which a launch, 1.5 us, is 5 %. The product of a
# larger weight is left to XLA, whose kernels may be faster than this one by more than that.
MAX_BYTES = 96_000_000


def fused_linear(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm: Norm | None = None,
    is_gated: bool = False,
    residual: jax.Array | None = None,
    kernels: str = "auto",
) -> jax.Array:
    """Return the rows [N, F] in x's dtype; products are accumulated in f32.

    Args:
        x: [N, D].
        weight: [D, F]; if it is gated [D, 2 F], gate | up.
        norm: of x before the product; its `eps` and `is_centred` are Python values.
        is_gated: SwiGLU (Shazeer 2020) after the product.
        residual: [N, F], added to the product; not with `is_gated`.
        kernels: implementation to use, see `dispatch.run`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(f"x must be [N, D] and weight [D, F]; got {x.shape} and {weight.shape}")
    if is_gated and weight.shape[1] % 2:
        raise ValueError(f"weight must be [D, 2 F] with is_gated; got {weight.shape}")
    if is_gated and residual is not None:
        raise ValueError("residual must be None with is_gated")
    if norm is not None and norm.weight.shape != x.shape[1:]:
        raise ValueError(f"norm.weight must be [D={x.shape[1]}]; got {norm.weight.shape}")
    shape = x.shape[0], weight.shape[1]
    if residual is not None and residual.shape != shape:
        raise ValueError(f"residual must be [N, F] = {shape}; got {residual.shape}")
    return run(
        *("fused_linear", kernels, IMPLEMENTATIONS, x, weight),
        norm=norm,
        is_gated=is_gated,
        residual=residual,
    )


def is_fused(num_rows: int, weight: jax.Array | jax.ShapeDtypeStruct, kernels: str) -> bool:
    """Return whether a model should use `fused_linear` for so many rows.

    It should if there is a kernel for them on this device that is worth its launches; else what
    XLA makes of the single operations is as good.

    Args:
        num_rows: of x.
        weight: of which only shape [D, F] and dtype are read.
        kernels: see `dispatch.choose`.
    """
    return (
        choose("fused_linear", kernels, tuple(IMPLEMENTATIONS)) != "reference"
        and num_rows <= MAX_ROWS
        and weight.size * weight.dtype.itemsize <= MAX_BYTES
        and weight.dtype in DTYPES
        and all(size % ALIGNMENT == 0 for size in weight.shape)
    )
