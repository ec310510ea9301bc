"""The feed-forward layer, and the activation functions before its down projection."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from specjax.device.models.layers.rows import Rows
from specjax.device.weights.matrix import Matrix, dense


class Activation(Protocol):
    """A hashable function that turns outputs of gate and up projections into activations."""

    # Names in checkpoints of the projections whose outputs are the input, in the order of columns.
    inputs: ClassVar[tuple[str, ...]]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the activations [N, F], which are the input of the down projection.

        x [N, P F] holds the outputs of the P projections in `inputs`, each F wide.
        """
        ...


@dataclass(frozen=True)
class SwiGLU:
    """The activation silu(gate) up (Shazeer 2020). Columns of `gate` precede columns of `up`."""

    inputs: ClassVar[tuple[str, ...]] = ("gate", "up")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return silu(gate) up [N, F] for x [N, 2 F], the outputs of gate and up projections."""
        gate, up = jnp.split(x, 2, axis=-1)
        return jax.nn.silu(gate) * up


SWIGLU = SwiGLU()


@dataclass(frozen=True)
class GeGLU:
    """The activation gelu(gate) up with the tanh approximation (Shazeer 2020).

    The columns have the same order as for `SwiGLU`.
    """

    inputs: ClassVar[tuple[str, ...]] = ("gate", "up")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return gelu(gate) up [N, F] for x [N, 2 F], the outputs of gate and up projections."""
        gate, up = jnp.split(x, 2, axis=-1)
        return jax.nn.gelu(gate, approximate=True) * up


@dataclass(frozen=True)
class SquaredReLU:
    """The activation max(up, 0)^2, which has no gate (So et al. 2021)."""

    inputs: ClassVar[tuple[str, ...]] = ("up",)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return max(x, 0)^2 for x [N, F], the output of the up projection."""
        return jnp.square(jax.nn.relu(x))


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The activation gate sigmoid(alpha gate) (up + 1) of gpt-oss, with `gate` and `up` clamped.

    Columns of `gate` and `up` alternate.
    """

    limit: float
    alpha: float

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the activations [N, F] for x [N, 2 F], the outputs of gate and up projections."""
        gate, up = jnp.minimum(x[:, ::2], self.limit), jnp.clip(x[:, 1::2], -self.limit, self.limit)
        return gate * jax.nn.sigmoid(gate * self.alpha) * (up + 1)


class FeedSettings(Protocol):
    """The model settings that feed-forward layers read."""

    @property
    def activation(self) -> Activation: ...
    @property
    def experts(self) -> Any: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLP:
    """Weights of a feed-forward layer."""

    inner: Matrix  # [D, len(inputs) F]: the projections of the activation's `inputs`, concatenated
    down: Matrix  # [F, D]

    def feed(self, x: jax.Array, model: FeedSettings, rows: Rows) -> jax.Array:
        """Return the layer's output [N, D] for x [N, D]. `rows` is not used."""
        return mlp(self, x, model.activation)

    def feed_part(self, x: jax.Array, activation: Activation = SWIGLU) -> jax.Array:
        """Return this device's part [N, D] of the output.

        If the weights are divided over devices, the output is the sum of all parts (see
        `Weight.total`). Otherwise, the part is the whole output.
        """
        return self.down.multiply_part(activation(self.inner.multiply(x)))


def mlp(params: MLP, x: jax.Array, activation: Activation = SWIGLU) -> jax.Array:
    """Return the layer's output down(activation(inner(x))) [N, D] for x [N, D]."""
    return params.down.total(params.feed_part(x, activation))


def mlp_specs(
    prefix: str,
    dim: int,
    inner: int,
    activation: Activation = SWIGLU,
    is_merged: bool = False,
    name: str = "mlp",
) -> MLP:
    """Return the weights as `TensorSpec`s with Hugging Face's names.

    `prefix` is the layer's name in checkpoints, `dim` is the hidden size, and `inner` is the width
    F of the activations. `is_merged` says whether the checkpoint stores gate and up in one
    tensor. `name` is the name of the inner axis, which can be divided over devices (see
    `TensorSpec.cuts`).
    """
    inputs = [f"{prefix}.{name}_proj.weight" for name in activation.inputs]
    sizes = [inner] * len(inputs)
    if is_merged:
        inputs, sizes = [f"{prefix}.gate_up_proj.weight"], [sum(sizes)]
    return MLP(
        inner=dense(inputs, dim, sizes, columns=((name, inner),) * len(activation.inputs)),
        down=dense([f"{prefix}.down_proj.weight"], inner, [dim], rows=name),
    )
