"""The output norm. It has a separate kernel, because no program has all outputs of a head."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_rule.triton.arithmetic import silu
from pallas_kernels.gated_delta_rule.triton.tuning import has_one_owner
from pallas_kernels.triton_call import load, store, triton_call

NUM_WARPS = 4


def run_norm(out, x, norm, heads, *, eps, config, interpret):
    """Return the outputs [B, T, H_v, D_v], normalised and then gated by z, which is read from x."""
    assert has_one_owner(config.norm_heads * heads.value_dim, NUM_WARPS), config
    (out,) = triton_call(
        partial(_norm_kernel, channels=heads.channels, tile=config.norm_heads, eps=eps),
        [out, x, norm],
        [jax.ShapeDtypeStruct(out.shape, out.dtype)],
        name="gated_delta_rule_norm",
        grid=(pl.cdiv(heads.num_values, config.norm_heads), *x.shape[:2]),
        num_warps=NUM_WARPS,
        aliases={0: 0},
        interpret=interpret,
    )
    return out


def _norm_kernel(_, x_ref, norm_ref, out_ref, *, channels, tile, eps):
    """Compute `reference.gated_norm`, with rounding in the same places.

    The kernel has no other operations that the compiler could fuse with the norm. So the roundings
    are the same for any number of tokens.
    """
    num_heads, value_dim = out_ref.shape[2:]
    part, row, t = (pl.program_id(i) for i in range(3))
    head = (part * tile + jnp.arange(tile, dtype=jnp.int32))[:, None]
    value = jnp.arange(value_dim, dtype=jnp.int32)[None]
    # In interpret mode masked lanes store the old value, so they must point out of range.
    at = out_ref.at[row, t, jnp.where(head < num_heads, head, num_heads), value]
    mask = jnp.broadcast_to(head < num_heads, (tile, value_dim))
    o = load(at, mask=mask, other=0.0)
    z = load(x_ref.at[row, t, channels + head * value_dim + value], mask=mask, other=0.0)
    norm = norm_ref[value]
    y = o.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.sum(y * y, axis=1, keepdims=True) / value_dim + eps)
    y = y.astype(o.dtype).astype(jnp.float32) * norm.astype(jnp.float32)
    y = y.astype(jnp.promote_types(o.dtype, norm.dtype)).astype(jnp.float32)
    # Padding rows stay zero even if their gate is NaN.
    y = jnp.where(o == 0, 0.0, y * silu(z.astype(jnp.float32)))
    store(at, y.astype(o.dtype), mask=mask)
