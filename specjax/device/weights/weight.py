"""The interface of all weights, and functions on trees of parameters that contain weights."""

import math
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.tree_util import GetAttrKey

W = TypeVar("W", bound=type)
# Fields of weights that are arrays or None.
ARRAYS = "values", "scales", "zeros", "factors", "order", "column_blocks"
# On a CPU, parameters of at most this many bytes can also be kept in a second, faster form.
MAX_DOUBLED = 2**30


class Weight:
    """One or more matrices. Layers multiply rows by them.

    A weight is a pytree. Its leaves are the fields that `ARRAYS` lists, which are `values` and
    often others, such as scales. In a model's `specs()`, a `TensorSpec` takes the place of an
    array. If a model is divided over devices, the arrays are one device's parts.
    """

    values: Any
    # The mesh axis over which products are added up, if the devices hold parts of the inputs.
    axis: str | None = None

    @property
    def numbers(self) -> tuple[str, ...]:
        """The kinds of quantised numbers, for example "fp8" or "int4"; () if none are quantised."""
        return ()

    def total(self, part: jax.Array) -> jax.Array:
        """Return the product [..., out], given this device's result `part` [..., out].

        If each device has multiplied only some of the inputs, the product is the sum over devices.
        """
        return part if self.axis is None else jax.lax.psum(part, self.axis)

    def changes_on(self, platform: str, dtype: Any) -> bool:
        """Return whether `on(platform)` can change this weight if its array has `dtype`.

        `platform` is "cpu" or "gpu". The field `values` can still be a `TensorSpec`.
        """
        return False

    def on(self, platform: str) -> "Weight":
        """Return the weight in the form with which devices of `platform` multiply fastest."""
        return self

    def plain(self, dtype: Any) -> "Weight":
        """Return the weight, dequantised to `dtype` if it is quantised."""
        return self

    def quantise(self, plain: Any) -> Any:
        """Return the weight `plain`, quantised like this weight and with its dtypes.

        `plain` has the class of the result of `self.plain`. The numbers of `plain` are rounded to
        the nearest quantised numbers. The numbers of `self` are not read, so `self` can hold shapes
        in place of arrays, except for i32 arrays such as an order of inputs.
        """
        return replace(plain, values=plain.values.astype(self.values.dtype))

    def with_kernels(self, kernels: str) -> "Weight":
        """Return the weight, set to multiply with `kernels` if its class can choose kernels."""
        return self


def is_weight(x: Any) -> bool:
    """Return whether x is a weight."""
    return isinstance(x, Weight)


def weights_on(platform: str, params: Any, kernels: str = "auto") -> Any:
    """Return the tree `params` with every weight in its form for `platform` ("cpu" or "gpu").

    Arrays that need not change are not copied. If all parameters together have more than
    `MAX_DOUBLED` bytes, no array changes. Weights whose class can choose kernels use `kernels`.
    """
    if kernels != "auto":
        params = jax.tree.map(
            lambda x: x.with_kernels(kernels) if is_weight(x) else x, params, is_leaf=is_weight
        )
    if sum(x.nbytes for x in jax.tree.leaves(params)) > MAX_DOUBLED:
        return params
    return jax.tree.map(lambda x: x.on(platform) if is_weight(x) else x, params, is_leaf=is_weight)


def second_form_bytes(platform: str, dtype: Any, tree: Any) -> int:
    """Return the maximum number of bytes that `weights_on` adds to parameters in `dtype`.

    The leaves of `tree` are the arrays, or their `TensorSpec`s.
    """

    def size(x: Any) -> int:
        return math.prod(x.shape) * np.dtype(x.dtype or dtype).itemsize

    if sum(map(size, jax.tree.leaves(tree))) > MAX_DOUBLED:
        return 0
    weights = filter(is_weight, jax.tree.leaves(tree, is_leaf=is_weight))
    return sum(size(x.values) for x in weights if x.changes_on(platform, dtype))


class _Values(GetAttrKey):
    """The pytree key of a weight's field `values`, its main array.

    The key prints as an empty string. So in a tree, the path of the array `values` is the path of
    the weight.
    """

    def __str__(self) -> str:
        return ""


def weight(cls: W) -> W:
    """Register a dataclass as a pytree. The fields named in `ARRAYS` are leaves, others static."""
    names = [field.name for field in fields(cls)]
    arrays = [name for name in names if name in ARRAYS]
    static = [name for name in names if name not in arrays]
    keys = [_Values(name) if name == "values" else GetAttrKey(name) for name in arrays]

    def flatten(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(x, n) for n in arrays), tuple(getattr(x, n) for n in static)

    def flatten_with_keys(x: Any) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        children, others = flatten(x)
        return tuple(zip(keys, children, strict=True)), others

    def unflatten(others: tuple[Any, ...], children: Iterable[Any]) -> Any:
        return cls(**dict(zip([*arrays, *static], (*children, *others), strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
