"""Weights of experts: one matrix per expert."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.grouped_matmul import grouped_matmul
from specjax.checkpoint.spec import experts, fused_experts
from specjax.device.weights.weight import Weight, weight


@dataclass(frozen=True)
class ExpertWeights(Weight):
    """A matrix [in, out] for each of E experts."""

    values: jax.Array
    axis: str | None = None  # see `Weight`

    def multiply(
        self,
        x: jax.Array,
        sizes: jax.Array,
        *,
        sources: jax.Array | None = None,
        targets: jax.Array | None = None,
        kernels: str,
    ) -> jax.Array:
        """Return the product of each row with its expert's matrix; see `grouped_matmul`.

        Rows are sorted by expert, and `sizes` are the numbers of rows per expert.
        """
        raise NotImplementedError


@weight
@dataclass(frozen=True)
class ExpertMatrices(ExpertWeights):
    """The experts' matrices as one array [E, in, out]."""

    def multiply(
        self,
        x: jax.Array,
        sizes: jax.Array,
        *,
        sources: jax.Array | None = None,
        targets: jax.Array | None = None,
        kernels: str,
    ) -> jax.Array:
        """See `ExpertWeights`."""
        return grouped_matmul(x, self.values, sizes, sources, targets, kernels=kernels)


def expert_matrices(
    names: Sequence[Sequence[str]], num_in: int, num_outs: Sequence[int], **axis: str
) -> ExpertMatrices:
    """Return `ExpertMatrices` of experts whose projections are separate tensors.

    The projections of an expert are merged into one matrix. The result holds a `TensorSpec` instead
    of an array. `checkpoint.spec.experts` explains the arguments.
    """
    return ExpertMatrices(experts(names, num_in, num_outs, **axis))


def fused_expert_matrices(
    name: str, num_experts: int, num_in: int, num_out: int, is_swapped: bool = False, **axis: Any
) -> ExpertMatrices:
    """Return `ExpertMatrices` of experts that are all stored in one tensor.

    The result has a `TensorSpec` instead of an array. `checkpoint.spec.fused_experts` explains the
    arguments.
    """
    return ExpertMatrices(fused_experts(name, num_experts, num_in, num_out, is_swapped, **axis))
