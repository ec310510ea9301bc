"""Weights of experts as 4-bit numbers with a scale per group of inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from pallas_kernels.grouped_packed_matmul import grouped_packed_matmul
from pallas_kernels.packed_matmul import FourBits
from pallas_kernels.packed_matmul.reference import unpacked
from specjax.checkpoint.quantised.packed import PackedTensor
from specjax.checkpoint.spec import TensorSpec
from specjax.device.weights.experts import ExpertMatrices, ExpertWeights
from specjax.device.weights.packed import nearest_arrays, packed_specs
from specjax.device.weights.stacked import stacked
from specjax.device.weights.weight import weight


@weight
@dataclass(frozen=True)
class PackedExperts(ExpertWeights):
    """A matrix [in, out] for each of E experts, as 4-bit numbers u8[E, out, bytes].

    `grouped_packed_matmul` describes the arrays.
    """

    scales: jax.Array = field(kw_only=True)  # [E, groups, out]
    zeros: jax.Array | None = field(default=None, kw_only=True)  # u8[E, groups, out]
    factors: jax.Array | None = field(default=None, kw_only=True)  # f32[E, out]
    num_in: int = field(kw_only=True)
    form: FourBits = field(kw_only=True)

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
        given = x, *self._arrays, sizes, sources, targets
        return grouped_packed_matmul(*given, form=self.form, kernels=kernels)

    def plain(self, dtype: Any) -> ExpertMatrices:
        """See `Weight`."""
        wide = unpacked(*self._arrays, self.form, self.num_in, dtype)
        return ExpertMatrices(wide.swapaxes(-1, -2), self.axis)

    @property
    def numbers(self) -> tuple[str, ...]:
        """See `Weight`."""
        return ("fp4" if self.form.is_float else "int4",)

    def quantise(self, plain: ExpertMatrices) -> "PackedExperts":
        """See `Weight`."""
        matrices = plain.values.swapaxes(1, 2)
        return replace(self, **jax.vmap(partial(nearest_arrays, self))(matrices))

    @property
    def _arrays(self) -> tuple[Any, Any, Any, Any]:
        return self.values, self.scales, self.zeros, self.factors


def packed_experts(spec: TensorSpec, tensors: Sequence[PackedTensor]) -> Any:
    """Return `PackedExperts` that hold `tensors`, with `TensorSpec`s in the places of arrays.

    `spec` is the `TensorSpec` of the same experts without quantisation. The result is None if the
    tensors differ in form, have reordered inputs, or hold several experts each.
    """
    form = tensors[0].form
    if form.order or not spec.num_stacked or any(one.form != form for one in tensors):
        return None
    each = len(tensors) // spec.num_stacked
    given = {"names": ("",) * each, "file_shapes": spec.file_shapes[:each]}
    made = stacked(spec, packed_specs(given, tensors[:each]))
    arrays: Any = {"scales": made.scales, "zeros": made.zeros, "factors": made.factors}
    return PackedExperts(made.values, **arrays, num_in=made.num_in, form=made.form)
