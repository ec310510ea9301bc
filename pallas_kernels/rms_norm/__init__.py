"""RMSNorm, together with the residual sum before it (Zhang & Sennrich 2019).

    y = x + delta      out = w y / sqrt(mean(y^2) + eps)

If the checkpoint stores scales minus one, 1 + w replaces w. XLA compiles a norm without a sum to
one kernel, so there is no Triton kernel for a norm alone. For a sum and its norm, XLA makes two
kernels or recomputes the sum.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.rms_norm.reference import add_rms_norm_reference
from pallas_kernels.rms_norm.reference import rms_norm as rms_norm
from pallas_kernels.rms_norm.triton import add_rms_norm_triton

IMPLEMENTATIONS = {"triton": add_rms_norm_triton, "reference": add_rms_norm_reference}


def add_rms_norm(
    x: jax.Array,
    delta: jax.Array,
    weight: jax.Array,
    eps: float,
    is_centred: bool = False,
    *,
    kernels: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Return the sum y and its norm, both [N, D] in x's dtype; statistics are f32.

    Args:
        x: [N, D], the residual.
        delta: [N, D], added to the residual.
        weight: [D], the weight w.
        eps: added to the mean square.
        is_centred: whether w is the scale minus one, so that 1 + w is the factor.
        kernels: implementation to use, see `dispatch`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"x must be [N, D] and weight [D]; got {x.shape} and {weight.shape}")
    if delta.shape != x.shape:
        raise ValueError(f"delta must be [N, D] = {x.shape}; got {delta.shape}")
    return run("add_rms_norm", kernels, IMPLEMENTATIONS, x, delta, weight, eps, is_centred)
