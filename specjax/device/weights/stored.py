"""Matrices in the forms in which checkpoints store them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import jax

from specjax.checkpoint.division import DividedSpec
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.packed import PackedTensor
from specjax.checkpoint.quantised.scaled import ScaledTensor
from specjax.checkpoint.spec import TensorSpec
from specjax.device.weights.matrix import Dense
from specjax.device.weights.mixed import Mixed
from specjax.device.weights.packed import packed_specs
from specjax.device.weights.scaled import scaled_specs
from specjax.device.weights.weight import is_weight

# By class of the stored tensors: a function that returns the specs of the matrix that merges them.
FORMS: dict[type, Callable[[Any, Any], Any]] = {
    ScaledTensor: scaled_specs,
    PackedTensor: packed_specs,
}


def dequantise(params: Any, dtype: Any) -> Any:
    """Return a tree of parameters in which every matrix is `Dense`, in `dtype`."""
    return jax.tree.map(lambda x: x.plain(dtype) if is_weight(x) else x, params, is_leaf=is_weight)


def as_stored(specs: Any, files: TensorFiles, rename: Callable[[str], str]) -> Any:
    """Return specs in which matrices of quantised tensors keep the numbers that are stored.

    A matrix that merges tensors is `Mixed` if some of them have another form. Matrices that are
    divided over devices stay `Dense`: their tensors are unpacked.

    Args:
        specs: a tree of `TensorSpec`.
        files: the result of `Format.join`.
        rename: see `load_params`.
    """

    def of(x: Any) -> Any:
        if not isinstance(x, Dense) or isinstance(x.values, DividedSpec):
            return x
        spec: Any = x.values
        found = [files.tensors.get(rename(name)) for name in spec.names]
        keys = [(type(one), one.form) if type(one) in FORMS else None for one in found]  # pyright: ignore
        groups = groupby(range(len(keys)), keys.__getitem__)
        made = [_one_form(spec, found, [*places]) for _, places in groups]
        return Mixed(tuple(made), x.parts) if len(made) > 1 else replace(made[0], parts=x.parts)

    return jax.tree.map(of, specs, is_leaf=is_weight)


def unpacked(specs: Any, files: TensorFiles, rename: Callable[[str], str]) -> list[str]:
    """Return the names of quantised tensors that are unpacked while they are loaded.

    `as_stored` explains the arguments.
    """
    leaves = jax.tree.leaves(as_stored(specs, files, rename))
    plain = [spec for spec in leaves if type(spec) in (TensorSpec, DividedSpec)]
    names = dict.fromkeys(rename(name) for spec in plain for name in spec.names)
    return [name for name in names if type(files.tensors.get(name)) in FORMS]


def _one_form(spec: TensorSpec, found: Sequence[Any], at: list[int]) -> Any:
    """Return the specs of the columns of adjacent tensors, which have the same form."""
    own = slice(at[0], at[-1] + 1)
    given: dict[str, Any] = {"names": spec.names[own], "file_shapes": spec.file_shapes[own]}
    given["interleaved"] = spec.interleaved[own]
    make = FORMS.get(type(found[at[0]]))
    if make is None:
        plain: Any = replace(spec, **given)
        return Dense(plain)
    return make(given, found[own])
