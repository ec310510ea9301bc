"""The residual stream between layers: what a layer reads of it, and what it adds to it.

On a GPU a step of a few rows of a small model is bound by its launches. There a projection applies
the norm before it and the sum after it in its own launch (`fused_linear`); elsewhere the sum and
the norm are one launch, and products are XLA's.
"""

from typing import NamedTuple, Protocol

import jax

from pallas_kernels.fused_linear import Norm, fused_linear, is_fused, swiglu
from pallas_kernels.rms_norm import add_rms_norm, rms_norm
from specjax.device.models.layers.linear import linear


class NormSettings(Protocol):
    """The norm settings of a model."""

    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def has_centred_norms(self) -> bool: ...


class NormedRows(NamedTuple):
    """Rows [N, D] that a layer reads: `x`, under `norm` if it was not applied yet."""

    x: jax.Array  # [N, D]
    norm: Norm | None
    kernels: str

    @property
    def value(self) -> jax.Array:
        """The rows [N, D], normed."""
        return self.x if self.norm is None else rms_norm(self.x, *self.norm)

    def project(self, weight: jax.Array) -> jax.Array:
        """Multiply the rows by a weight [D, F]: [N, F]."""
        if self.norm is not None and is_fused(self.x, self.x.shape[1], self.kernels):
            return fused_linear(self.x, weight, norm=self.norm, kernels=self.kernels)
        return linear(self.value, weight)

    def gate(self, weight: jax.Array) -> jax.Array:
        """Multiply the rows by a weight [D, 2 F] of gate | up; return silu(gate) * up [N, F]."""
        if is_fused(self.x, self.x.shape[1], self.kernels):
            return fused_linear(self.x, weight, norm=self.norm, is_gated=True, kernels=self.kernels)
        return swiglu(linear(self.value, weight))


class Residual(NamedTuple):
    """Rows [N, D] and the last layer's output, if it is not added yet: the next norm does that in
    the same launch."""

    x: jax.Array  # [N, D]
    delta: jax.Array | None  # [N, D]

    def sum(self) -> jax.Array:
        """Return the rows [N, D]."""
        return self.x if self.delta is None else self.x + self.delta

    def normed(
        self, weight: jax.Array, model: NormSettings, kernels: str
    ) -> tuple[jax.Array, NormedRows]:
        """Return the rows [N, D], and what the next layer reads of them under this norm."""
        norm = Norm(weight, model.rms_norm_eps, model.has_centred_norms)
        if self.delta is None:
            return self.x, NormedRows(self.x, norm, kernels)
        x, normed = add_rms_norm(self.x, self.delta, *norm, kernels=kernels)
        return x, NormedRows(normed, None, kernels)


class Addend(NamedTuple):
    """What a layer adds to the stream."""

    value: jax.Array  # [N, D]

    def onto(self, x: jax.Array, kernels: str) -> Residual:
        """Return the stream x [N, D] after the layer."""
        return Residual(x, self.value)


class Product(NamedTuple):
    """What a layer adds to the stream, before its last projection."""

    rows: jax.Array  # [N, F]
    weight: jax.Array  # [F, D]
    bias: jax.Array | None = None  # [D]

    @property
    def value(self) -> jax.Array:
        """The output [N, D]."""
        y = linear(self.rows, self.weight)
        return y if self.bias is None else y + self.bias[None]

    def onto(self, x: jax.Array, kernels: str) -> Residual:
        """Return the stream x [N, D] after the layer."""
        if self.bias is None and is_fused(self.rows, x.shape[1], kernels):
            x = fused_linear(self.rows, self.weight, residual=x, kernels=kernels)
            return Residual(x, None)
        return Residual(x, self.value)
