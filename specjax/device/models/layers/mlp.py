"""The gated feed-forward layer (SwiGLU)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specjax.device.models.layers.rows import Rows
from specjax.device.weights.matrix import Matrix, dense


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLP:
    """Weights of a SwiGLU layer; gate and up are concatenated."""

    gate_up: Matrix  # [D, 2 F]
    down: Matrix  # [F, D]

    def feed(self, x: jax.Array, experts: Any, rows: Rows) -> jax.Array:
        """Run the layer; it has no `experts`, and its rows are all alike."""
        return mlp(self, x)


def mlp(params: MLP, x: jax.Array) -> jax.Array:
    """Compute down(swiglu(gate_up x)) of x [N, D]."""
    return params.down.multiply(SwiGLU()(params.gate_up.multiply(x)))


@dataclass(frozen=True)
class SwiGLU:
    """silu(gate) up; gate's columns come before up's (Shazeer 2020)."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return [N, F] of [N, 2 F]."""
        gate, up = jnp.split(x, 2, axis=-1)
        return jax.nn.silu(gate) * up


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's: gate sigmoid(alpha gate) (up + 1), both clamped; their columns alternate."""

    limit: float
    alpha: float

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return [N, F] of [N, 2 F]."""
        gate, up = jnp.minimum(x[:, ::2], self.limit), jnp.clip(x[:, 1::2], -self.limit, self.limit)
        return gate * jax.nn.sigmoid(gate * self.alpha) * (up + 1)


def mlp_specs(prefix: str, dim: int, inner: int, is_merged: bool = False) -> MLP:
    """Return the weights as `TensorSpec`s, with Hugging Face's names.

    `is_merged` is for checkpoints that have gate and up in one tensor.
    """
    gate, up, down = (f"{prefix}.{name}_proj.weight" for name in ("gate", "up", "down"))
    inputs, sizes = [gate, up], [inner, inner]
    if is_merged:
        inputs, sizes = [f"{prefix}.gate_up_proj.weight"], [2 * inner]
    return MLP(
        gate_up=dense(inputs, dim, sizes, axes=(None, "mlp")),
        down=dense([down], inner, [dim], axes=("mlp", None)),
    )
