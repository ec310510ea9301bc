"""Weights of projections as 4-bit numbers with a scale per group of inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packed_matmul import FourBits, packed_matmul
from pallas_kernels.packed_matmul.reference import unpacked
from specjax.checkpoint.quantised.nearest4 import nearest_floats, nearest_integers
from specjax.checkpoint.quantised.packed import PackedForm, PackedTensor
from specjax.checkpoint.spec import TensorSpec, module_of
from specjax.device.weights.matrix import Dense
from specjax.device.weights.quantised import Quantised
from specjax.device.weights.weight import weight


@weight
@dataclass(frozen=True)
class Packed(Quantised):
    """A matrix [in, out] as 4-bit numbers u8[out, bytes]; see `packed_matmul`.

    Inputs that share a scale must be adjacent in the array. If they are not adjacent in the model,
    the array has another order: its input i is the model's input order[i]. If order[i] is past the
    model's last input, input i is padding.
    """

    scales: jax.Array = field(kw_only=True)  # [groups, out]
    zeros: jax.Array | None = field(kw_only=True)  # u8[groups, out]
    factors: jax.Array | None = field(kw_only=True)  # f32[out]
    order: jax.Array | None = field(kw_only=True)  # i32[in], see `PackedTensor.order`
    num_in: int = field(kw_only=True)  # number of the model's inputs, without padding
    form: FourBits = field(kw_only=True)

    def plain(self, dtype: Any) -> Dense:
        """See `Weight`."""
        depth = self.num_in if self.order is None else len(self.order)
        matrix = unpacked(*self._arrays, self.form, depth, dtype).T
        if self.order is not None:
            wide = jnp.zeros((self.num_in, self.num_out), dtype)
            matrix = wide.at[self.order].set(matrix, mode="drop")
        return Dense(matrix, self.parts, self.axis)

    @property
    def numbers(self) -> tuple[str, ...]:
        """See `Weight`."""
        return ("fp4" if self.form.is_float else "int4",)

    def quantise(self, plain: Any) -> "Packed":
        """Return the weight `plain`, quantised like this weight, with inputs in the same order."""
        matrix = plain.by_output
        if self.order is not None:
            matrix = matrix.at[:, self.order].get(mode="fill", fill_value=0)
        return replace(self, **nearest_arrays(self, matrix))

    def outputs(self, ids: jax.Array) -> "Packed":
        """See `Quantised`."""
        zeros = None if self.zeros is None else self.zeros[:, ids]
        factors = None if self.factors is None else self.factors[ids]
        own: dict[str, Any] = {"zeros": zeros, "factors": factors}
        return replace(self, values=self.values[ids], scales=self.scales[:, ids], **own)

    def _multiply(self, x: jax.Array, dtype: Any, first: int) -> jax.Array:
        if self.order is not None:
            x = x.at[:, self.order].get(mode="fill", fill_value=0)
        given = x, *self._arrays, self.form, dtype, first
        return packed_matmul(*given, kernels=self.kernels)

    @property
    def _arrays(self) -> tuple[Any, Any, Any, Any]:
        return self.values, self.scales, self.zeros, self.factors


def nearest_arrays(old: Any, matrix: jax.Array) -> dict[str, Any]:
    """Return `matrix` [out, in], quantised like `old`, as a dict from field names to arrays.

    `old` is a `Packed`, or has the same fields. Its inputs are in the order of `matrix`.
    Weights are rounded to the nearest numbers.
    """
    form, dtype = old.form, old.scales.dtype.name
    if form.is_float:
        has_factors = old.factors is not None
        made = nearest_floats(matrix, form.group, dtype, has_factors=has_factors)
    else:
        made = nearest_integers(matrix, form.group, dtype, has_zeros=old.zeros is not None)
    zeros = None if made.zeros is None else made.zeros.T
    others = {"scales": made.scales.T, "zeros": zeros, "factors": made.factors}
    return {"values": form.pack(made.codes), **others}


@dataclass(frozen=True, kw_only=True)
class _Spec(TensorSpec):
    """The `TensorSpec` of one of the arrays of a `Packed` weight, such as its scales.

    `file_shapes` are the shapes [out, in] of the unpacked weights.
    """

    form: PackedForm

    @property
    def is_stored(self) -> bool:
        """False: `file_shapes` are shapes of the unpacked weights, not of tensors in the file."""
        return False

    @property
    def num_out(self) -> int:
        """The number of columns of the matrix."""
        return sum(rows for rows, _ in self.file_shapes)

    @property
    def packing(self) -> FourBits:
        """How the numbers are packed in the engine's array."""
        return FourBits(self.form.group, self.form.unpack.is_float)

    @property
    def num_groups(self) -> int:
        """The number of groups of inputs that share a scale."""
        return self.packing.num_groups(self.form.num_in)

    def merge(self, parts: Sequence[Any]) -> Any:
        """Return one array [out, ...] that merges `parts`, which come from one file tensor each."""
        shapes = tuple(part.shape for part in parts)
        names = ("",) * len(parts)
        return TensorSpec(names, shapes, interleaved=self.interleaved).join(parts, parts[0].dtype)


@dataclass(frozen=True, kw_only=True)
class _CodesSpec(_Spec):
    """The `TensorSpec` of the 4-bit codes.

    The codes are unpacked from the file's layout, and packed again in the layout of
    `packed_matmul`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSpec`."""
        return self.num_out, self.packing.width(self.form.num_in)

    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """Return the tensors of packed numbers, and then the order of inputs if it is not None."""
        tensors = [find(name) for name in self.names]
        order = [] if tensors[0].order is None else [tensors[0].order]
        return [tensor.weight.read() for tensor in tensors] + order

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """See `TensorSpec`."""
        words = zip(parts, self.file_shapes, strict=False)
        unpack = self.form.unpack.codes
        codes = self.merge([unpack(one)[:rows, :depth] for one, (rows, depth) in words])
        xp = module_of(codes)
        if self.form.order:  # an index past the last input marks padding
            codes = xp.pad(codes, ((0, 0), (0, 1)))[:, parts[-1]]
        return self.packing.pack(codes, xp)


@dataclass(frozen=True, kw_only=True)
class _GroupsSpec(_Spec):
    """The spec of the scales or zero points [groups, out]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSpec`."""
        return self.num_groups, self.num_out


@dataclass(frozen=True, kw_only=True)
class _ScalesSpec(_GroupsSpec):
    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """See `TensorSpec.read`."""
        return [find(name).read_scales() for name in self.names]

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """See `TensorSpec`."""
        xp, unpack = module_of(parts[0]), self.form.unpack.scales
        pairs = zip(parts, self.file_shapes, strict=True)
        pairs = [(unpack(part), (self.num_groups, rows)) for part, (rows, _) in pairs]
        return self.merge([xp.broadcast_to(*pair).T for pair in pairs]).T


@dataclass(frozen=True, kw_only=True)
class _ZerosSpec(_GroupsSpec):
    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """See `TensorSpec.read`."""
        return [find(name).used_zeros for name in self.names]

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """See `TensorSpec`."""
        return self.merge([part.T for part in parts]).T


@dataclass(frozen=True, kw_only=True)
class _FactorsSpec(_Spec):
    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSpec`."""
        return (self.num_out,)

    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """See `TensorSpec.read`."""
        return [find(name).read_factor() for name in self.names]

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """Return the factors f32[out]. All outputs of a file tensor have the same factor."""
        xp, pairs = module_of(parts[0]), zip(parts, self.file_shapes, strict=True)
        return xp.concatenate([xp.broadcast_to(part.reshape(1), rows) for part, (rows, _) in pairs])


@dataclass(frozen=True, kw_only=True)
class _OrderSpec(_Spec):
    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSpec`."""
        return (self.form.num_in,)

    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """See `TensorSpec.read`."""
        return [find(self.names[0]).order]

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """See `TensorSpec`."""
        return parts[0]


def packed_specs(given: Mapping[str, Any], tensors: Sequence[PackedTensor]) -> Packed:
    """Return the `Packed` that merges `tensors`. It has `TensorSpec`s instead of arrays.

    All tensors have the same `form`. `given` maps fields of `TensorSpec`, for example `names`, to
    their values for these tensors.
    """
    form = tensors[0].form

    def spec(kind: type[_Spec], dtype: str) -> Any:
        return kind(**given, form=form, dtype=dtype)

    values = spec(_CodesSpec, "uint8")
    return Packed(
        values,
        scales=spec(_ScalesSpec, form.scales_dtype),
        zeros=spec(_ZerosSpec, "uint8") if form.has_zeros else None,
        factors=spec(_FactorsSpec, "float32") if form.has_factor else None,
        order=spec(_OrderSpec, "int32") if form.order else None,
        num_in=tensors[0].shape[1],
        form=values.packing,
    )
