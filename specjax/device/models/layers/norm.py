"""Normalisation layers shared by the models."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis of x [..., dim], statistics in f32 (Zhang & Sennrich 2019)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return weight * y.astype(x.dtype)
