"""Routers of a mixture of experts: which experts a row goes to, and with which weights.

A router owns its weights and the rule that `route` chooses by: a model only names it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.route import Rule
from specjax.checkpoint.spec import TensorSpec
from specjax.device.weights.matrix import Matrix, dense


class Router(Protocol):
    """A choice of experts. Hashable; its weights are an opaque pytree."""

    def specs(self, prefix: str, dim: int, num_experts: int) -> Any:
        """Return the weights as `TensorSpec`s; `prefix` is the mixture's in the checkpoint."""
        ...

    @property
    def rule(self) -> Rule:
        """How experts are chosen and weighted."""
        ...

    def logits(self, params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the logits [N, E] of rows x [N, D], and the correction f32[E] of the choice."""
        ...


@dataclass(frozen=True)
class SoftmaxRouter:
    """Experts with the largest logits, weighted by the softmax over all or the chosen ones."""

    normalises: bool = True  # over the chosen experts, so that their weights sum to one

    def specs(self, prefix: str, dim: int, num_experts: int) -> Any:
        """See `Router.specs`: one matrix [D, E]."""
        return dense([f"{prefix}.gate.weight"], dim, [num_experts])

    @property
    def rule(self) -> Rule:
        """See `Router.rule`."""
        return Rule(normalises=self.normalises)

    def logits(self, params: Any, x: jax.Array) -> tuple[jax.Array, None]:
        """See `Router.logits`."""
        return params.multiply(x), None


class SigmoidWeights(NamedTuple):
    """Weights of a `SigmoidRouter`."""

    weight: Matrix  # [D, E]
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
            (f"{prefix}.gate.e_score_correction_bias",),
            ((num_experts,),),
            dtype="float32",
            is_buffer=True,
        )
        return SigmoidWeights(dense([f"{prefix}.gate.weight"], dim, [num_experts]), correction)

    @property
    def rule(self) -> Rule:
        """See `Router.rule`."""
        groups = self.num_groups, self.num_chosen_groups
        return Rule(True, self.normalises, self.scaling, *groups)

    def logits(self, params: SigmoidWeights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Router.logits`; the logits are f32."""
        return params.weight.multiply(x, jnp.float32), params.correction
