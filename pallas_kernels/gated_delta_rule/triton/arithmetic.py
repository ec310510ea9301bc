"""Arithmetic of the gated delta rule's kernels: f32 products on tensor cores, and gates."""

import jax
import jax.numpy as jnp

from pallas_kernels.triton_call import dot


def dot_f32(a, b, **transposed):
    """Return the product a b, computed in f32 on tf32 tensor cores.

    Each operand is split into two tf32 halves. The products of two lower halves are dropped. They
    are at most 2^-22 of the products of the whole elements.
    """
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    small = dot(a_high, b_low, allow_tf32=True, **transposed)
    small = small + dot(a_low, b_high, allow_tf32=True, **transposed)
    return small + dot(a_high, b_high, allow_tf32=True, **transposed)


def dot_f32_t(a, b):
    return dot_f32(a, b, trans_b=True)


def _halves(a):
    high = _rounded(a)
    return high, _rounded(a - high)


def _rounded(a):
    """Return `a`, rounded to tf32 (ten mantissa bits). Tensor cores would truncate it instead."""
    bits = jax.lax.bitcast_convert_type(a, jnp.int32) + 0x1000
    return jax.lax.bitcast_convert_type(bits & ~0x1FFF, jnp.float32)


def invert_unit_lower(lower, i):
    """Return (I + A)^-1 for one matrix A = `lower` [n, n]. `i` are the row numbers i32[n].

    `reference.invert_unit_lower` explains the method. X holds the inverses of the diagonal blocks
    of I + A, and is zero elsewhere. Each step doubles the size of the diagonal blocks: it replaces
    X by X - X C X, where C has the entries of A within the new blocks but outside of the old
    blocks, and is zero elsewhere.
    """
    i, j = i[:, None], i[None]

    def merge(level, inverse):
        size = jnp.left_shift(jnp.int32(1), level)
        block_i, block_j = i // size, j // size
        is_corner = (block_i // 2 == block_j // 2) & (block_i > block_j)
        corner = jnp.where(is_corner, lower, 0.0)
        return inverse - dot_f32(dot_f32(inverse, corner), inverse)

    num_levels = lower.shape[0].bit_length() - 1
    return jax.lax.fori_loop(0, num_levels, merge, jnp.where(i == j, 1.0, 0.0))


def sigmoid(z):
    return 1 / (1 + jnp.exp(-z))


def silu(z):
    return z / (1 + jnp.exp(-z))


def softplus(z):
    return jnp.maximum(z, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(z)))
