"""Rotary position embedding, with the frequency scalings of supported checkpoints."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Angles(NamedTuple):
    """Cosines and sines of the angles by which N rows are rotated."""

    cos: jax.Array  # f32[N, head_dim / 2]
    sin: jax.Array  # f32[N, head_dim / 2]
    query_scales: jax.Array | None = None  # f32[N, 1, 1], multiply queries; None for 1

    @property
    def rotation(self) -> tuple[jax.Array, jax.Array]:
        """The pair of `cos` and `sin`."""
        return self.cos, self.sin


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The rotary frequencies of a model; `head_dim` is the number of rotated dimensions per head.

    `scaling` is one of four kinds:

        "default"    frequencies are not scaled
        "linear"     all frequencies are divided by `factor`
        "llama3"     low frequencies are divided by `factor`, and high frequencies are kept. For
                     frequencies between these, the result is a weighted mean of the divided and
                     the original frequency. The weights are linear in the frequency (Llama 3.1)
        "yarn"       as "llama3", but the weights are linear in the frequency's index (Peng et al.
                     2023, section 3.2)
    """

    head_dim: int
    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    # For YaRN: a frequency is kept if it has more than `beta_fast` rotations within the original
    # length, and divided by `factor` if it has fewer than `beta_slow`.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True  # whether the ramp starts and ends at whole indices
    attention_factor: float = 1.0  # multiplies cos and sin
    query_beta: float = 0.0  # how fast queries grow with their position, see `_query_scales`

    def inverse_frequencies(self) -> np.ndarray:
        """Return the angular frequency of each rotated pair, f32[head_dim / 2]."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        freq = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        if self.scaling == "linear":
            return freq / np.float32(self.factor)
        if self.scaling in ("llama3", "yarn"):
            keep = self._llama3_kept(freq) if self.scaling == "llama3" else self._yarn_kept()
            return ((1 - keep) * freq / self.factor + keep * freq).astype(np.float32)
        return freq

    def angles(self, positions: jax.Array) -> Angles:
        """Return the angles for rows at `positions` i32[N]."""
        angle = positions.astype(jnp.float32)[:, None] * self.inverse_frequencies()[None, :]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return Angles(cos, sin, self._query_scales(positions))

    def _query_scales(self, positions: jax.Array) -> jax.Array | None:
        """Return the scales of queries, f32[N, 1, 1]; None if `query_beta` is 0.

        The scales sharpen attention over long contexts (Llama 4's temperature). They are 1 within
        the original length L. Later they grow as 1 + query_beta log(1 + position // L).
        """
        if not self.query_beta:
            return None
        lengths = (positions // self.original_max_position).astype(jnp.float32)
        return (1 + self.query_beta * jnp.log1p(lengths))[:, None, None]

    def _llama3_kept(self, freq: np.ndarray) -> np.ndarray:
        """Return a weight from 0 to 1 for each frequency, f32[head_dim / 2].

        A frequency with weight 1 is kept, and a frequency with weight 0 is divided by `factor`.
        Between low and high frequencies, weights rise linearly with the frequency.
        """
        wavelength = 2 * math.pi / freq
        ramp = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return np.clip(ramp, 0.0, 1.0)

    def _yarn_kept(self) -> np.ndarray:
        """Return a weight from 0 to 1 for each frequency, f32[head_dim / 2].

        A frequency with weight 1 is kept, and a frequency with weight 0 is divided by `factor`.
        Between high and low frequencies, weights fall linearly with the frequency's index.
        """

        def index(rotations: float) -> float:
            """Return the fractional index of the frequency with this number of rotations.

            The rotations are counted over the original context length.
            """
            wavelength = self.original_max_position / rotations
            return self.head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(self.theta))

        first, last = index(self.beta_fast), index(self.beta_slow)
        if self.truncates:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.head_dim - 1)
        width = last - first or 0.001
        indices = np.arange(self.head_dim // 2, dtype=np.float32)
        return 1 - np.clip((indices - first) / width, 0.0, 1.0)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's multiplier of cos and sin: 0.1 weight log(factor) + 1, or 1 if `factor` <= 1.

    `factor` is the context length after scaling, divided by the length before scaling.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
