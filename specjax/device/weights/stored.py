"""Weights in the forms in which checkpoints store them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import jax

from specjax.checkpoint.division import DividedSpec
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.packed import PackedTensor
from specjax.checkpoint.quantised.parts import PackedPart
from specjax.checkpoint.quantised.scaled import ScaledTensor
from specjax.checkpoint.spec import TensorSpec
from specjax.device.placement import is_divided
from specjax.device.weights.divided import divided_as_stored
from specjax.device.weights.experts import ExpertMatrices
from specjax.device.weights.latent_up import LatentUp
from specjax.device.weights.matrix import Dense
from specjax.device.weights.mixed import Mixed
from specjax.device.weights.mxfp4_experts import mxfp4_specs
from specjax.device.weights.packed import packed_specs
from specjax.device.weights.packed_experts import packed_experts
from specjax.device.weights.scaled import scaled_specs
from specjax.device.weights.scaled_experts import scaled_experts
from specjax.device.weights.scaled_latent_up import scaled_latent_up
from specjax.device.weights.stored_table import StoredTable
from specjax.device.weights.table import Table
from specjax.device.weights.weight import is_weight

# By class of the stored tensors: a function that returns the specs of the matrix that merges them.
FORMS: dict[type, Callable[[Any, Any], Any]] = {
    ScaledTensor: scaled_specs,
    PackedTensor: packed_specs,
    PackedPart: packed_specs,
}
# The same for the matrices of experts. These functions return None if the tensors differ in form.
EXPERTS: dict[type, Callable[[Any, Any], Any]] = {
    ScaledTensor: scaled_experts,
    PackedTensor: packed_experts,
    PackedPart: packed_experts,
}


def dequantise(params: Any, dtype: Any) -> Any:
    """Return the tree `params` with each quantised weight dequantised to `dtype`."""

    def plain(x: Any) -> Any:
        if not is_weight(x) or not x.numbers:
            return x
        is_whole = not any(map(is_divided, jax.tree.leaves(x)))
        return (_plain if is_whole else _plain_divided)(x, dtype)

    return jax.tree.map(plain, params, is_leaf=is_weight)


# Jitted, because each operation alone would be a program. Weights of the same form share a program.
@partial(jax.jit, static_argnames="dtype")
def _plain(x: Any, dtype: Any) -> Any:
    return x.plain(dtype)


@partial(jax.jit, static_argnames="dtype")
def _plain_divided(x: Any, dtype: Any) -> Any:
    return jax.vmap(lambda part: part.plain(dtype))(x)


def as_stored(specs: Any, files: TensorFiles, rename: Callable[[str], str]) -> Any:
    """Return `specs`, changed so that weights that are quantised in the files stay quantised.

    Specs of unquantised weights, and of weights in a form that must be unpacked, are unchanged.

    Args:
        specs: a tree of weights, with `TensorSpec`s in the places of arrays.
        files: the checkpoint's tensors, as `Format.join` returns them.
        rename: see `load_params`.
    """

    def of(x: Any) -> Any:
        make = STORED.get(type(x))
        if make is None:
            return x
        found = [files.tensors.get(rename(name)) for name in x.values.names]
        if isinstance(x.values, DividedSpec):
            return divided_as_stored(x, found, make)
        return make(x, found)

    return jax.tree.map(of, specs, is_leaf=is_weight)


def _matrix(x: Dense, found: Sequence[Any]) -> Any:
    """Return the matrix `x` in the form in which the checkpoint stores it.

    `found` holds the checkpoint's tensors that `x` merges. If these tensors have different forms,
    the result is a `Mixed`.
    """
    spec: Any = x.values
    keys = [(type(one), one.form) if type(one) in FORMS else None for one in found]
    groups = groupby(range(len(keys)), keys.__getitem__)
    made = [_one_form(spec, found, [*places]) for _, places in groups]
    if len(made) > 1:
        return Mixed(tuple(made), x.parts, x.axis)
    return replace(made[0], parts=x.parts, axis=x.axis)


def unpacked(specs: Any, files: TensorFiles, rename: Callable[[str], str]) -> list[str]:
    """Return the names of quantised tensors that are unpacked while they are loaded.

    See `as_stored` for the arguments.
    """
    leaves = jax.tree.leaves(as_stored(specs, files, rename))
    plain = [spec for spec in leaves if type(spec) in (TensorSpec, DividedSpec)]
    names = dict.fromkeys(rename(name) for spec in plain for name in spec.names)
    return [name for name in names if type(files.tensors.get(name)) in FORMS]


def _one_form(spec: TensorSpec, found: Sequence[Any], at: list[int]) -> Any:
    """Return the matrix that merges some adjacent tensors, which have the same form.

    `found` holds all tensors of a larger matrix, and `at` holds the indices of the tensors to
    merge. `spec` is the `TensorSpec` of the larger matrix without quantisation.
    """
    own = slice(at[0], at[-1] + 1)
    given: dict[str, Any] = {"names": spec.names[own], "file_shapes": spec.file_shapes[own]}
    given["interleaved"] = spec.interleaved[own]
    make = FORMS.get(type(found[at[0]]))
    if make is None:
        plain: Any = replace(spec, **given)
        return Dense(plain)
    return make(given, found[own])


def _table(x: Table, found: Sequence[Any]) -> Any:
    """Return `x`, or a `StoredTable` if the table's tensor in the file is quantised."""
    made = _one_form(x.values, found, [0])  # pyright: ignore[reportArgumentType]
    if type(made) is Dense:
        return x
    return StoredTable(made, x.axis, row_dtype=found[0].dtype.name)


def _experts(x: ExpertMatrices, found: Sequence[Any]) -> Any:
    """Return the experts `x` in the form in which the checkpoint stores them.

    `found` holds the checkpoint's tensors that `x` merges. If these tensors have no common form,
    `x` is returned unchanged.
    """
    spec: Any = x.values
    if spec.is_packed:
        return replace(mxfp4_specs(spec), axis=x.axis)
    (kind, *others) = {type(one) for one in found}
    make = None if others else EXPERTS.get(kind)
    made = None if make is None else make(spec, found)
    return x if made is None else replace(made, axis=x.axis)


def _latent_up(x: LatentUp, found: Sequence[Any]) -> Any:
    (tensor,) = found
    return scaled_latent_up(x, tensor) if isinstance(tensor, ScaledTensor) else x


# By class of plain weights: a function that takes the specs of one, and its stored tensors (None
# for those that do not exist). It returns the specs of the weight with the stored numbers.
STORED: dict[type, Callable[[Any, Sequence[Any]], Any]] = {
    Dense: _matrix,
    ExpertMatrices: _experts,
    LatentUp: _latent_up,
    Table: _table,
}
