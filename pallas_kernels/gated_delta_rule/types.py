"""Sizes, weights and cache of the gated delta rule."""

from typing import NamedTuple

import jax


class Heads(NamedTuple):
    """Head counts and dimensions of one layer."""

    num_keys: int  # H_k, which divides H_v
    num_values: int  # H_v
    key_dim: int  # D_k
    value_dim: int  # D_v

    @property
    def channels(self) -> int:
        """C, channels of q | k | v."""
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim

    @property
    def inputs(self) -> int:
        """Width of q | k | v, output gate z, and write gate b and decay a of every value head."""
        return self.channels + self.num_values * (self.value_dim + 2)


class DeltaRuleWeights(NamedTuple):
    """Weights of one layer; those of the decay are always f32."""

    conv: jax.Array  # [W, C], the oldest token first
    log_decay: jax.Array  # f32[H_v]
    decay_bias: jax.Array  # f32[H_v]
    norm: jax.Array | None  # [D_v], shared by the heads; None if o itself is the output


class DeltaRuleCache(NamedTuple):
    """States and rings of S slots in L layers."""

    state: jax.Array  # f32[L, S, H_v, D_v, D_k]
    ring: jax.Array  # [L, S, R, C], raw inputs q | k | v
    gates: jax.Array  # f32[L, S, R, 2, H_v], g and beta

    @property
    def heads(self) -> Heads:
        """Head counts and dimensions, derived from the shapes."""
        num_values, value_dim, key_dim = self.state.shape[2:]
        key_channels = self.ring.shape[3] - num_values * value_dim
        return Heads(key_channels // (2 * key_dim), num_values, key_dim, value_dim)

    def max_pending(self, num_taps: int) -> int:
        """Return M, for a convolution over W = `num_taps` tokens."""
        return (self.ring.shape[2] - (num_taps - 1)) // 2


def num_ring_columns(num_taps: int, max_pending: int) -> int:
    """Return R = W - 1 + 2 M: convolution history, pending tokens and new tokens."""
    return num_taps - 1 + 2 * max_pending
