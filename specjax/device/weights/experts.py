"""Weights of experts: a matrix each."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from pallas_kernels.grouped_matmul import grouped_matmul
from specjax.checkpoint.spec import experts, fused_experts
from specjax.device.weights.weight import Weight, weight


@weight
@dataclass(frozen=True)
class ExpertMatrices(Weight):
    """A matrix [in, out] for each of E experts."""

    values: jax.Array  # [E, in, out]

    def multiply(
        self,
        x: jax.Array,
        sizes: jax.Array,
        *,
        sources: jax.Array | None = None,
        targets: jax.Array | None = None,
        kernels: str,
    ) -> jax.Array:
        """Multiply rows that are sorted by expert; see `grouped_matmul`."""
        return grouped_matmul(x, self.values, sizes, sources, targets, kernels=kernels)


def expert_matrices(
    names: Sequence[Sequence[str]], num_in: int, num_outs: Sequence[int]
) -> ExpertMatrices:
    """Return the specs of experts whose projections are separate tensors, merged by expert."""
    return ExpertMatrices(experts(names, num_in, num_outs))


def fused_expert_matrices(
    name: str, num_experts: int, num_in: int, num_out: int, is_swapped: bool = False
) -> ExpertMatrices:
    """Return the specs of experts in one tensor, see `fused_experts`."""
    return ExpertMatrices(fused_experts(name, num_experts, num_in, num_out, is_swapped))
