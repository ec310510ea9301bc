"""Rotary position embedding, with the frequency scalings of supported checkpoints."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary frequencies of one model; `head_dim` is the number of rotated dimensions per head.

    `scaling` is "default", "linear" (positions divided by `factor`) or "llama3" (Llama 3.1: long
    wavelengths divided by `factor`, short ones kept, a smooth ramp between).
    """

    head_dim: int
    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self) -> np.ndarray:
        """Return the angular frequency of each rotated pair, f32[head_dim / 2]."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        freq = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        if self.scaling == "linear":
            return freq / np.float32(self.factor)
        if self.scaling == "llama3":
            wavelength = 2 * math.pi / freq
            ramp = (self.original_max_position / wavelength - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            keep = np.clip(ramp, 0.0, 1.0)
            return ((1 - keep) * freq / self.factor + keep * freq).astype(np.float32)
        return freq

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return cos and sin, each f32[N, head_dim / 2], of the rotation at positions i32[N]."""
        angle = positions.astype(jnp.float32)[:, None] * self.inverse_frequencies()[None, :]
        return jnp.cos(angle), jnp.sin(angle)
