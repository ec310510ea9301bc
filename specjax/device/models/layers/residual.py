"""The residual stream between layers: a layer's output is added in the launch of the next norm."""

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
    """Rows [N, D], and the last layer's output, which is not added yet."""

    x: jax.Array  # [N, D]
    delta: jax.Array  # [N, D]

    def sum(self) -> jax.Array:
        """Return the rows [N, D]."""
        return self.x + self.delta

    def normed(
        self, weight: jax.Array, model: NormSettings, kernels: str
    ) -> tuple[jax.Array, jax.Array]:
        """Return the rows [N, D], and the same under this norm."""
        eps, is_centred = model.rms_norm_eps, model.has_centred_norms
        return add_rms_norm(self.x, self.delta, weight, eps, is_centred, kernels=kernels)
