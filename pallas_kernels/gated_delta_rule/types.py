"""What the gated delta rule is given beside its inputs."""

from typing import NamedTuple

import jax


class Heads(NamedTuple):
    """Sizes of the rule in one layer."""

    num_keys: int  # H_k, which divides H_v
    num_values: int  # H_v
    key_dim: int  # D_k
    value_dim: int  # D_v

    @property
    def channels(self) -> int:
        """C, of q, k and v side by side."""
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim

    @property
    def inputs(self) -> int:
        """Those, the output gate z, and the write gate b and the decay a of every value head."""
        return self.channels + self.num_values * (self.value_dim + 2)


class DeltaRuleWeights(NamedTuple):
    """Weights of the rule in one layer; those of the decay are f32 whatever the others are."""

    conv: jax.Array  # [W, C], the oldest token first
    log_decay: jax.Array  # f32[H_v]
    decay_bias: jax.Array  # f32[H_v]
    norm: jax.Array | None  # [D_v], shared by the heads; None where o itself is the output


class DeltaRuleCache(NamedTuple):
    """States and rings of S slots in L layers."""

    state: jax.Array  # f32[L, S, H_v, D_v, D_k]
    ring: jax.Array  # [L, S, R, C], raw inputs q | k | v
    gates: jax.Array  # f32[L, S, R, 2, H_v], g and beta

    @property
    def heads(self) -> Heads:
        """Sizes of the rule that this is a cache of."""
        num_values, value_dim, key_dim = self.state.shape[2:]
        key_channels = self.ring.shape[3] - num_values * value_dim
        return Heads(key_channels // (2 * key_dim), num_values, key_dim, value_dim)

    def max_pending(self, num_taps: int) -> int:
        """M, of a convolution over W = `num_taps` tokens."""
        return (self.ring.shape[2] - (num_taps - 1)) // 2


def num_ring_columns(num_taps: int, max_pending: int) -> int:
    """R = W - 1 + 2 M: the history of the convolution, the pending tokens and the new ones."""
    return num_taps - 1 + 2 * max_pending
