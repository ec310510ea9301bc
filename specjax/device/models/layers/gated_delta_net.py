"""Gated DeltaNet (Yang et al. 2024): a mixer whose memory is one matrix per head."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule import Heads
from pallas_kernels.rms_norm import rms_norm
from specjax.device.models.layers.rows import Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatedDeltaNet:
    """Weights of the mixer; decay parameters are f32 whatever the others are."""

    in_proj: jax.Array  # [D, C + H_v D_v + 2 H_v], q | k | v, output gate z, write gate b, decay a
    conv: jax.Array  # [W, C]
    log_decay: jax.Array  # f32[H_v]
    decay_bias: jax.Array  # f32[H_v]
    norm: jax.Array  # [D_v], shared by the heads
    out: jax.Array  # [H_v D_v, D]


def gated_delta_net(
    params: GatedDeltaNet,
    x: jax.Array,
    rows: Rows,
    cache: Any,
    layer: jax.Array,
    heads: Heads,
    eps: float,
) -> tuple[jax.Array, Any]:
    """Project x [N, D], run the gated delta rule, norm and gate its output: ([N, D], cache).

    beta = sigmoid(b), g = -exp(log_decay) softplus(a + decay_bias),
    out = w norm(o) silu(z).
    """
    inner = heads.num_values * heads.value_dim
    ends = heads.channels, heads.channels + inner, heads.channels + inner + heads.num_values
    raw, z, b, a = jnp.split(x @ params.in_proj, ends, axis=-1)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    g = -jnp.exp(params.log_decay) * jax.nn.softplus(a + params.decay_bias)
    gates = jnp.stack([g, jax.nn.sigmoid(b)], axis=1)
    o, cache = rows.recur(cache, layer, raw, gates, params.conv, heads)
    gate = jax.nn.silu(z.astype(jnp.float32))
    y = rms_norm(o, params.norm, eps).astype(jnp.float32) * gate.reshape(o.shape)
    return y.astype(x.dtype).reshape(x.shape[0], -1) @ params.out, cache
