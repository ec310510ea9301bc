"""Routers of a mixture of experts. A router determines each row's experts and their weights.

A router defines its parameters, its logits and a `Rule`. The kernel `route` applies the rule to the
logits, and so chooses experts and computes their weights. A model has one of the routers, and does
not define routing itself.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.route import Rule
from specjax.checkpoint.spec import TensorSpec
from specjax.device.weights.matrix import Matrix, dense


class Router(Protocol):
    """The interface of routers. A router is hashable.

    Only a router's methods read its parameters.
    """

    def specs(self, prefix: str, dim: int, num_experts: int) -> Any:
        """Return the parameters as `TensorSpec`s.

        `prefix` is the mixture's name in checkpoints.
        """
        ...

    @property
    def rule(self) -> Rule:
        """How the kernel `route` chooses experts from the logits and computes their weights."""
        ...

    def logits(self, params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the logits [N, E] of rows x [N, D], and a correction f32[E] or None.

        The correction affects which experts are chosen, but not their weights.
        """
        ...


@dataclass(frozen=True)
class SoftmaxRouter:
    """A router whose rule chooses the experts with the largest logits.

    The weights are a softmax over the logits of the chosen experts, or of all experts.
    """

    normalises: bool = True  # whether the softmax is over the chosen experts only

    def specs(self, prefix: str, dim: int, num_experts: int) -> Any:
        """Return the `TensorSpec` of one matrix [D, E]; see `Router.specs`."""
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
    """A router whose rule chooses the experts with the largest corrected sigmoids of logits.

    The correction balances the experts' load (DeepSeek-V3, sec. 2.1.2). It affects only the choice:
    weights are the uncorrected sigmoids.

    If the experts are divided into groups, only experts in the `num_chosen_groups` best groups are
    chosen. A group's score is the sum of its two largest corrected sigmoids.
    """

    normalises: bool = True  # whether the weights are divided by their sum
    scaling: float = 1.0  # multiplies the weights, normalised or not
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
        """Return logits f32[N, E] and the correction f32[E]; see `Router.logits`."""
        return params.weight.multiply(x, jnp.float32), params.correction
