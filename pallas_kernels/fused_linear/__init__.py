"""A projection of few rows, with what stands before and after it, in one launch.

    y = norm(x) weight      out = silu(y[:, :F]) y[:, F:]  if it is gated, or residual + y

For so few rows a projection takes as long as reading its weight. What XLA launches beside it, the
norm, the activation or the sum, takes little of the GPU and yet as long as a launch does.
"""

import jax

from pallas_kernels.capability import compute_capability
from pallas_kernels.dispatch import choose, run
from pallas_kernels.fused_linear.reference import Norm as Norm
from pallas_kernels.fused_linear.reference import fused_linear_reference
from pallas_kernels.fused_linear.reference import swiglu as swiglu
from pallas_kernels.fused_linear.triton import DTYPES, MAX_ROWS, fused_linear_triton

IMPLEMENTATIONS = {"triton": fused_linear_triton, "reference": fused_linear_reference}
# An estimate: a layer of a stream this wide reads some 230 MB, in 75 us on an H100, and three
# launches fewer are 5 us. In a wider layer they are worth less than what XLA's kernels for these
# products may be faster than this one.
MAX_WIDTH = 3072
# Major versions of GPUs with the 227 KiB of shared memory that the tiles are made for.
CAPABILITIES = 9, 10


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


def is_fused(x: jax.Array | jax.ShapeDtypeStruct, width: int, kernels: str) -> bool:
    """Return whether the projections of a residual stream should be `fused_linear`.

    They should if there is a kernel for these rows on this device that is worth the launches it
    saves; else what XLA makes of the single operations is as good.

    Args:
        x: rows [N, ...], of which only shape and dtype are read.
        width: of the residual stream.
        kernels: see `dispatch.choose`.
    """
    capability = compute_capability()  # None where the kernel is interpreted
    return (
        choose("fused_linear", kernels, tuple(IMPLEMENTATIONS)) != "reference"
        and x.shape[0] <= MAX_ROWS
        and width <= MAX_WIDTH
        and x.dtype in DTYPES
        and (capability is None or capability[0] in CAPABILITIES)
    )
