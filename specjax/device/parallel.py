"""Makes the `TensorSpec`s and parameters of models and heads that are divided over devices."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol, Self

import jax

from specjax.checkpoint.division import DividedSpec, Share, divide
from specjax.checkpoint.given import paths
from specjax.checkpoint.spec import TensorSpec
from specjax.device.loading import lay_out_whole
from specjax.device.placement import AXIS, DIVIDED, Placement, divided_shape
from specjax.device.weights.table import Table
from specjax.device.weights.weight import Weight, is_weight


class Divisible(Protocol):
    """The interface of a model or draft head whose weights can be divided over devices."""

    @property
    def num_devices(self) -> int:
        """The number of devices over which the weights are divided."""
        ...

    @property
    def shares(self) -> Mapping[str, Share]:
        """How each kind of axis, such as attention heads, is divided; see `TensorSpec.cuts`."""
        ...

    @property
    def local(self) -> Self:
        """The smaller model or head that each device runs.

        If there is only one device, this is the whole model or head.
        """
        ...

    def specs(self, names: Collection[str] = ()) -> Any:
        """Return the weights as a tree of `TensorSpec`s of whole arrays, which are not divided yet.

        `names` are the checkpoint's tensor names; see `Model.specs`.
        """
        ...


def specs_of(one: Divisible, names: Collection[str] = ()) -> Any:
    """Return the weights of a model or head as a tree of `TensorSpec`s.

    An array that is divided over devices has a `DividedSpec`. `names` are the names of the
    checkpoint's tensors; see `Model.specs`.

    Raises:
        ValueError: the weights cannot be divided; see `divide`.
    """
    whole = one.specs(names)
    if one.num_devices == 1:
        return whole
    tree = divide(whole, one.local.specs(names), one.shares, one.num_devices)
    return jax.tree.map(lambda x: _summed(x) if is_weight(x) else x, tree, is_leaf=is_weight)


def shapes_of(specs: Any, dtype: Any) -> Any:
    """Return the shapes of the arrays that a tree of `TensorSpec`s describes.

    If an array is divided over devices, its shape has the sharding `DIVIDED`; see `is_divided`.
    `dtype` is the dtype of arrays whose specs have no dtype.
    """

    def shape(spec: TensorSpec) -> jax.ShapeDtypeStruct:
        if isinstance(spec, DividedSpec):
            return divided_shape(spec.shape, spec.dtype or dtype)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype or dtype)

    return jax.tree.map(shape, specs)


def shapes_like(one: Divisible, params: Any) -> Any:
    """Return the shapes of `params`, marked as divided if the model or head `one` divides them.

    The leaves of `params` are arrays or shapes. Divided arrays must already be [devices, ...], but
    can be on one device. All arrays of a quantised weight are marked as divided if the unquantised
    weight would be divided.
    """
    specs = jax.tree_util.tree_leaves_with_path(specs_of(one), is_leaf=is_weight)
    divided = {path for path, x in specs if _is_divided(x)}

    def shape(path: Any, x: Any) -> Any:
        make = divided_shape if path in divided else jax.ShapeDtypeStruct
        return jax.tree.map(lambda array: make(array.shape, array.dtype), x)

    return jax.tree_util.tree_map_with_path(shape, params, is_leaf=is_weight)


def divide_params(one: Divisible, params: Any, placement: Placement) -> Any:
    """Return `params`, the parameters of a whole model or head, divided over devices.

    An array that is not divided is copied to every device of `placement`. `params` must have passed
    `check_shapes`.
    """
    specs, tree = jax.tree.flatten(specs_of(one))

    def divided(x: Any, spec: TensorSpec) -> jax.Array:
        if not isinstance(spec, DividedSpec):
            return placement.put(x)
        return lay_out_whole(x, spec, x.dtype, placement.sharding(DIVIDED))

    leaves = zip(jax.tree.leaves(params), specs, strict=True)
    return jax.tree.unflatten(tree, [divided(*each) for each in leaves])


def check_shapes(one: Divisible, params: Any) -> None:
    """Check that `one` can be divided, and that `params` have its shapes before division.

    The leaves of `params` are arrays or shapes.

    Raises:
        ValueError: the weights cannot be divided (see `divide`), or a shape is wrong.
    """
    specs_of(one)
    trees = one.specs(), params
    expected, found = ({path: x.shape for path, x in paths(y).items()} for y in trees)
    if expected != found:
        differ = [path for path in {**expected, **found} if expected.get(path) != found.get(path)]
        path, more = differ[0], f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        shapes = (list(x[path]) if path in x else "none" for x in (expected, found))
        raise ValueError(
            "params do not fit the Model value: {} (expected {}, found {}){}; pass the parameters "
            "of the whole model".format(path, *shapes, more)
        )


def padding_of(one: Divisible) -> str:
    """Return a text that lists the kinds of axes that are padded with zeros.

    A kind of axis is, for example, attention heads. For each kind, the text has the total size, and
    the number of devices times the size per device. It is empty if every kind divides evenly.
    """
    count = one.num_devices
    return ", ".join(
        f"{name} {share.total} as {count} x {share.size}"
        for name, share in one.shares.items()
        if count > 1 and name != "first" and sum(share.counts) < count * share.size
    )


def _is_divided(x: Any) -> bool:
    return any(isinstance(spec, DividedSpec) for spec in jax.tree.leaves(x))


def _summed(weight: Weight) -> Weight:
    """Return `weight`, changed to sum its results over devices if each device has a partial sum.

    Devices have partial sums if the axis of the inputs is divided, or if the weight is an embedding
    (`Table`) and its rows are divided.
    """
    spec: Any = weight.values
    if not isinstance(spec, DividedSpec) or not (spec.divides_input or isinstance(weight, Table)):
        return weight
    return replace(weight, axis=AXIS)  # pyright: ignore[reportArgumentType]
