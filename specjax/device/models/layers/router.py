"""Routers of a mixture of experts: which experts a row goes to, and with which weights.

A router owns its weights: a model only names it. Both compute their scores in f32.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from specjax.checkpoint.spec import TensorSpec, projection
from specjax.device.models.layers.linear import linear


class Router(Protocol):
    """A choice of experts. Hashable; its weights are an opaque pytree."""

    def specs(self, prefix: str, dim: int, num_experts: int) -> Any:
        """Return the weights as `TensorSpec`s; `prefix` is the mixture's in the checkpoint."""
        ...

    def choose(self, params: Any, x: jax.Array, num_chosen: int) -> tuple[jax.Array, jax.Array]:
        """Return the weights f32[N, C] and numbers i32[N, C] of the experts of rows x [N, D]."""
        ...


@dataclass(frozen=True)
class SoftmaxRouter:
    """Experts with the largest logits, weighted by the softmax over all or the chosen ones."""

    normalises: bool = True  # over the chosen experts, so that their weights sum to one

    def specs(self, prefix: str, dim: int, num_experts: int) -> Any:
        """See `Router.specs`: one matrix [D, E]."""
        return projection([f"{prefix}.gate.weight"], dim, [num_experts])

    def choose(self, params: Any, x: jax.Array, num_chosen: int) -> tuple[jax.Array, jax.Array]:
        """See `Router.choose`."""
        logits = linear(x, params)
        best, chosen = jax.lax.top_k(logits, num_chosen)
        best = best.astype(jnp.float32)
        if self.normalises:
            return jax.nn.softmax(best), chosen
        total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True)
        return jnp.exp(best - total), chosen


class SigmoidWeights(NamedTuple):
    """Weights of a `SigmoidRouter`."""

    weight: jax.Array  # [D, E]
    correction: jax.Array  # f32[E]


@dataclass(frozen=True)
class SigmoidRouter:
    """Experts with the largest sigmoids, corrected for balance (DeepSeek-V3, section 2.1.2).

    The correction takes part in the choice only: weights are the sigmoids themselves. With groups,
    experts are chosen among the groups whose two best experts have the largest sums.
    """

    normalises: bool = True
    scaling: float = 1.0  # of the weights, after they were normalised
    num_groups: int = 1
    num_chosen_groups: int = 1

    def specs(self, prefix: str, dim: int, num_experts: int) -> Any:
        """See `Router.specs`."""
        correction: Any = TensorSpec(
            (f"{prefix}.gate.e_score_correction_bias",), ((num_experts,),), dtype="float32"
        )
        return SigmoidWeights(projection([f"{prefix}.gate.weight"], dim, [num_experts]), correction)

    def choose(self, params: Any, x: jax.Array, num_chosen: int) -> tuple[jax.Array, jax.Array]:
        """See `Router.choose`."""
        scores = jax.nn.sigmoid(linear(x, params.weight, jnp.float32))
        _, chosen = jax.lax.top_k(self._in_groups(scores + params.correction), num_chosen)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.normalises:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return weights * self.scaling, chosen

    def _in_groups(self, scores: jax.Array) -> jax.Array:
        """Return the scores f32[N, E], -inf outside the chosen groups."""
        if self.num_chosen_groups == self.num_groups:
            return scores
        groups = scores.reshape(scores.shape[0], self.num_groups, -1)
        strength = jax.lax.top_k(groups, 2)[0].sum(axis=-1)  # [N, groups]
        _, kept = jax.lax.top_k(strength, self.num_chosen_groups)
        is_kept = (kept[:, :, None] == jnp.arange(self.num_groups)).any(axis=1)
        return jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(scores.shape)
