"""The residual stream between layers.

A layer's output is kept apart from the stream until the kernel of the next norm adds it.
"""

from typing import NamedTuple, Protocol

import jax

from pallas_kernels.rms_norm import add_rms_norm


class NormSettings(Protocol):
    """The norm settings of a model."""

    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def has_centred_norms(self) -> bool: ...


class Residual(NamedTuple):
    """The residual stream x before the latest layer, and `delta`, the output of this layer.

    The output has not been added to the stream yet.
    """

    x: jax.Array  # [N, D]
    delta: jax.Array  # [N, D]

    def sum(self) -> jax.Array:
        """Return the stream [N, D] after the latest layer."""
        return self.x + self.delta

    def normed(
        self, weight: jax.Array, model: NormSettings, kernels: str
    ) -> tuple[jax.Array, jax.Array]:
        """Return the stream [N, D] after the latest layer, and the normed stream [N, D]."""
        eps, is_centred = model.rms_norm_eps, model.has_centred_norms
        return add_rms_norm(self.x, self.delta, weight, eps, is_centred, kernels=kernels)
