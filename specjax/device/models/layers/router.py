"""Routers of a mixture of experts: they choose the experts of each row, and their weights.

A router owns its parameters and the `Rule` by which `route` chooses; a model only selects a router.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.route import Rule
from specjax.checkpoint.spec import TensorSpec
from specjax.device.weights.matrix import Matrix, dense


class Router(Protocol):
    """A router. Hashable; its parameters are a pytree that only it reads."""

    def specs(self, prefix: str, dim: int, num_experts: int) -> Any:
        """Return the parameters as `TensorSpec`s; `prefix` is the mixture's prefix in
        checkpoints."""
        ...

    @property
    def rule(self) -> Rule:
        """The rule that chooses and weights experts."""
        ...

    def logits(self, params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return logits [N, E] for rows x [N, D], and a correction f32[E] of the choice or None."""
        ...


@dataclass(frozen=True)
class SoftmaxRouter:
    """A router to the largest logits; weights are a softmax over all or the chosen experts."""

    normalises: bool = True  # the softmax is over the chosen experts

    def specs(self, prefix: str, dim: int, num_experts: int) -> Any:
        """Return one matrix [D, E]; see `Router.specs`."""
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
    """A router to the largest sigmoids, corrected for balance (DeepSeek-V3, sec. 2.1.2).

    The correction affects only the choice: weights are the uncorrected sigmoids. With groups,
    experts are chosen from the groups whose two best experts have the largest sums.
    """

    normalises: bool = True
    scaling: float = 1.0  # multiplies the normalised weights
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
        """Return f32 logits; see `Router.logits`."""
        return params.weight.multiply(x, jnp.float32), params.correction
