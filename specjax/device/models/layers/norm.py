"""Normalisation layers shared by the models."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis of x [..., dim], statistics in f32 (Zhang & Sennrich 2019)."""
    return weight * _normed(x, eps).astype(x.dtype)


def centred_rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm whose weight is stored as its distance from one; weighted in f32."""
    return (_normed(x, eps) * (1 + weight.astype(jnp.float32))).astype(x.dtype)


def _normed(x: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
