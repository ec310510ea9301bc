"""The interface of all weights, and their place in trees of parameters."""

import math
from dataclasses import fields
from typing import Any, TypeVar

import jax
import numpy as np
from jax.tree_util import GetAttrKey

W = TypeVar("W", bound=type)
# A CPU keeps a second form of at most this many bytes of weights. A larger model has them once.
MAX_DOUBLED = 2**30


class Weight:
    """A matrix, or several, by which rows are multiplied; a pytree of one array, `values`.

    In a model's `specs()` the array has a `TensorSpec` in its place.
    """

    values: Any

    def changes_on(self, platform: str, dtype: Any) -> bool:
        """Whether devices of `platform` ("cpu", "gpu") multiply by another form in this dtype."""
        return False

    def on(self, platform: str) -> "Weight":
        """Return the weight in the form by which devices of `platform` multiply fastest."""
        return self


def is_weight(x: Any) -> bool:
    """Whether x is a weight."""
    return isinstance(x, Weight)


def weights_on(platform: str, params: Any) -> Any:
    """Return a tree of parameters with every weight in its form for `platform` ("cpu", "gpu").

    What need not change is the same array, not a copy. Parameters of more than `MAX_DOUBLED` bytes
    stay as they are.
    """
    if sum(x.nbytes for x in jax.tree.leaves(params)) > MAX_DOUBLED:
        return params
    return jax.tree.map(lambda x: x.on(platform) if is_weight(x) else x, params, is_leaf=is_weight)


def second_form_bytes(platform: str, dtype: Any, tree: Any) -> int:
    """Return the bytes that `weights_on` adds to parameters in `dtype`, at most.

    `tree` has arrays or their `TensorSpec`s.
    """
    itemsize = np.dtype(dtype).itemsize

    def size(x: Any) -> int:
        return math.prod(x.shape) * itemsize

    if sum(map(size, jax.tree.leaves(tree))) > MAX_DOUBLED:
        return 0
    weights = filter(is_weight, jax.tree.leaves(tree, is_leaf=is_weight))
    return sum(size(x.values) for x in weights if x.changes_on(platform, dtype))


class _Values(GetAttrKey):
    """The key of a weight's array. It prints as nothing: the array's path is the weight's."""

    def __str__(self) -> str:
        return ""


def weight(cls: W) -> W:
    """Register a dataclass of `values`, and of static fields, as a pytree."""
    static = [field.name for field in fields(cls) if field.name != "values"]
    key = _Values("values")

    def flatten(x: Any) -> tuple[tuple[Any], tuple[Any, ...]]:
        return (x.values,), tuple(getattr(x, name) for name in static)

    def flatten_with_keys(x: Any) -> tuple[tuple[tuple[Any, Any]], tuple[Any, ...]]:
        (values,), others = flatten(x)
        return ((key, values),), others

    jax.tree_util.register_pytree_with_keys(
        cls, flatten_with_keys, lambda others, values: cls(*values, *others), flatten
    )
    return cls
