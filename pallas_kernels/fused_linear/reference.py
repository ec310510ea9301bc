"""The projection and what stands around it in plain JAX, one operation after the other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm.reference import rms_norm


class Norm(NamedTuple):
    """RMSNorm of the rows before they are projected."""

    weight: jax.Array  # [D]
    eps: float  # added to the mean square
    is_centred: bool  # the weight is stored minus one


def fused_linear_reference(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm: Norm | None = None,
    is_gated: bool = False,
    residual: jax.Array | None = None,
) -> jax.Array:
    """See `fused_linear`. Rounds to x's dtype after each operation."""
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps, norm.is_centred)
    y = jnp.matmul(x, weight)
    if is_gated:
        y = swiglu(y)
    return y if residual is None else residual + y


def swiglu(x: jax.Array) -> jax.Array:
    """Compute silu(gate) * up for concatenated gate | up [N, 2 F] (Shazeer 2020)."""
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up
