"""RMSNorm in plain JAX."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, is_centred: bool = False) -> jax.Array:
    """Return the RMSNorm over the last axis of x [..., D], with statistics in f32.

    The weight is applied in x's dtype, or in f32 if `is_centred`.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    weight = jax.lax.broadcast_to_rank(weight, y.ndim)
    if is_centred:
        return (y * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return weight * y.astype(x.dtype)


def add_rms_norm_reference(
    x: jax.Array, delta: jax.Array, weight: jax.Array, eps: float, is_centred: bool
) -> tuple[jax.Array, jax.Array]:
    """See `add_rms_norm`."""
    y = x + delta
    return y, rms_norm(y, weight, eps, is_centred)
