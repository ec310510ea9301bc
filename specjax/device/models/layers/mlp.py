"""The gated feed-forward layer (SwiGLU)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.fused_linear import swiglu
from specjax.checkpoint.spec import projection
from specjax.device.models.layers.residual import NormedRows, Product
from specjax.device.models.layers.rows import Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLP:
    """Weights of a SwiGLU layer; gate and up are concatenated."""

    gate_up: jax.Array  # [D, 2 F]
    down: jax.Array  # [F, D]

    projects: ClassVar[bool] = True  # all that reads the rows is a projection

    def feed(self, x: NormedRows, experts: Any, rows: Rows) -> Product:
        """Run the layer; it has no `experts`, and its rows are all alike."""
        return mlp(self, x)


def mlp(params: MLP, x: NormedRows) -> Product:
    """Compute down(swiglu(gate_up x))."""
    return Product(x.gate(params.gate_up), params.down)


@dataclass(frozen=True)
class SwiGLU:
    """`swiglu` as a value, for models that choose between activations."""

    is_of_kernel: ClassVar[bool] = True  # whether `grouped_matmul` applies it

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return [N, F] of [N, 2 F]."""
        return swiglu(x)


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's: gate sigmoid(alpha gate) (up + 1), both clamped; their columns alternate."""

    limit: float
    alpha: float
    is_of_kernel: ClassVar[bool] = False

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
        gate_up=projection(inputs, dim, sizes, axes=(None, "mlp")),
        down=projection([down], inner, [dim], axes=("mlp", None)),
    )
