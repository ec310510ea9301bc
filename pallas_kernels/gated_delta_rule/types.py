"""Sizes, weights and cache of the gated delta rule."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Heads(NamedTuple):
    """Head counts and dimensions of one layer with the gated delta rule."""

    num_keys: int  # H_k, which divides H_v
    num_values: int  # H_v
    key_dim: int  # D_k
    value_dim: int  # D_v

    @property
    def channels(self) -> int:
        """C, the number of channels of q | k | v."""
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim

    @property
    def inputs(self) -> int:
        """The width of a row's projection: q | k | v, the output gate z, and the gates b and a.

        Each value head has one write gate b and one decay a.
        """
        return self.channels + self.num_values * (self.value_dim + 2)


class DeltaRuleWeights(NamedTuple):
    """Weights of one layer with the gated delta rule; the decay weights are always f32."""

    conv: jax.Array  # [W, C], the oldest token first
    log_decay: jax.Array  # f32[H_v]
    decay_bias: jax.Array  # f32[H_v]
    norm: jax.Array | None  # [D_v], shared by the heads; None for no output norm


class DeltaRuleCache(NamedTuple):
    """The states of S slots in L layers, and ring buffers for the slots' last tokens.

    The token at position p is in column p mod the ring's length. M is the maximum number of pending
    tokens (accepted tokens that the state lacks), and also of new tokens in a call that verifies
    drafts. `pallas_kernels.gated_delta_rule` explains the rings' lengths.
    """

    state: jax.Array  # f32[L, S, H_v, D_v, D_k]
    ring: jax.Array  # [L, S, W - 1 + M, C], raw inputs q | k | v
    u: jax.Array  # f32[L, S, M, H_v, D_v], corrections
    k: jax.Array  # f32[L, S, 2 M, H_k, D_k], keys after convolution and norm
    decay: jax.Array  # f32[L, S, 2 M, H_v], e^g

    @classmethod
    def shapes(
        cls, layers: int, slots: int, heads: Heads, num_taps: int, max_pending: int, dtype: Any
    ) -> "DeltaRuleCache":
        """Return the shapes and dtypes (`jax.ShapeDtypeStruct`) of a cache.

        L is `layers`, S is `slots`, W is `num_taps`, the number of tokens that the convolution
        spans, and M is `max_pending`. `dtype` is the dtype of the raw inputs.
        """

        def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
            return jax.ShapeDtypeStruct((layers, slots, *sizes), dtype)

        num_keys, num_values, key_dim, value_dim = heads
        return cls(
            shape(num_values, value_dim, key_dim),
            shape(num_taps - 1 + max_pending, heads.channels, dtype=dtype),
            shape(max_pending, num_values, value_dim),
            shape(2 * max_pending, num_keys, key_dim),
            shape(2 * max_pending, num_values),
        )

    @property
    def heads(self) -> Heads:
        """Head counts and dimensions, derived from the arrays' shapes."""
        return Heads(self.k.shape[3], self.u.shape[3], self.k.shape[4], self.u.shape[4])

    @property
    def max_pending(self) -> int:
        """M, the maximum number of pending tokens."""
        return self.u.shape[2]
