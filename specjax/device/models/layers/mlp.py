"""The gated feed-forward layer."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLP:
    """Weights of a SwiGLU layer, gate and up side by side."""

    gate_up: jax.Array  # [D, 2 F]
    down: jax.Array  # [F, D]


def mlp(params: MLP, x: jax.Array) -> jax.Array:
    """down(silu(gate x) * up x) for x [N, D] (Shazeer 2020, SwiGLU)."""
    gate, up = jnp.split(x @ params.gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ params.down
