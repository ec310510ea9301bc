"""The residual stream between two layers."""

from typing import NamedTuple, Protocol

import jax

from pallas_kernels.rms_norm import add_rms_norm


class Normed(Protocol):
    """How a model's norms are; a model has these fields."""

    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def has_centred_norms(self) -> bool: ...


class Residual(NamedTuple):
    """Rows [N, D], and what the last layer adds to them, which the next norm does in one go."""

    x: jax.Array  # [N, D]
    delta: jax.Array  # [N, D]

    def sum(self) -> jax.Array:
        """The rows [N, D] with what is to be added."""
        return self.x + self.delta

    def normed(self, weight: jax.Array, model: Normed, kernels: str) -> tuple[jax.Array, jax.Array]:
        """The sum, and its RMSNorm."""
        eps, is_centred = model.rms_norm_eps, model.has_centred_norms
        return add_rms_norm(self.x, self.delta, weight, eps, is_centred, kernels=kernels)
