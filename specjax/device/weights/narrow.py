"""Quantises unquantised weights that are already in memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.packed_matmul import FourBits
from specjax.checkpoint.quantised.bits import BITS, Bits
from specjax.device.placement import AXIS, divided_shape, is_divided, local_shape
from specjax.device.weights.experts import ExpertMatrices
from specjax.device.weights.matrix import Dense
from specjax.device.weights.packed import Packed
from specjax.device.weights.scaled import Scaled
from specjax.device.weights.scaled_experts import ScaledExperts
from specjax.device.weights.table import Table
from specjax.device.weights.weight import Weight


def narrow(x: Weight, quantization: str) -> Weight:
    """Return the weight `x`, rounded to the numbers of `quantization`, a key of `BITS`.

    There is a scale per output; or, for 4-bit numbers, per output and group of inputs. An embedding
    table becomes a matrix that can only be used as an output head. A weight is returned unchanged
    if its class cannot be quantised like this, or if the number of inputs on a device is not a
    multiple of the group size.

    The weight can be divided over devices. If the array of `x` is only a shape, the arrays of the
    result are shapes, too.
    """
    make = _FORMS.get(type(x))
    local = jax.tree.map(lambda one: local_shape(_shape(one)), x)
    form = None if make is None else make(local, BITS[quantization])
    return x if form is None else _quantise(form, x)


def _quantise(form: Weight, x: Weight) -> Weight:
    """Return `x`, quantised like `form`. `form` is a weight whose arrays are only shapes."""
    shapes, tree = jax.tree.flatten(form)
    (array,) = jax.tree.leaves(x)
    quantise = _quantiser(tree, tuple(shapes), is_divided(array))
    if isinstance(array, jax.ShapeDtypeStruct):
        made = jax.eval_shape(quantise, x)
        return jax.tree.map(lambda one: _shape(one, like=array), made)
    return jax.jit(quantise, out_shardings=array.sharding)(x)


@lru_cache(maxsize=32)  # layers share a function, and so a compiled program
def _quantiser(tree: Any, shapes: tuple[Any, ...], is_divided: bool) -> Callable[[Weight], Weight]:
    """Return a function that quantises a plain weight like a given weight.

    The given weight has the pytree structure `tree` and the leaves `shapes`.
    """

    def quantise(plain: Weight) -> Weight:
        return jax.tree.unflatten(tree, shapes).quantise(plain)

    return jax.vmap(quantise, axis_name=AXIS) if is_divided else quantise


def _shape(array: Any, like: Any = None) -> jax.ShapeDtypeStruct:
    """Return the shape of `array`, marked as divided if `like` (by default `array`) is divided."""
    if is_divided(array if like is None else like):
        return divided_shape(array.shape, array.dtype)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _matrix(x: Dense | Table, bits: Bits) -> Weight | None:
    num_out, num_in = jax.eval_shape(lambda one: one.by_output, x).shape
    shape = jax.ShapeDtypeStruct
    if bits.group is None:
        scales: Any = shape((num_out, 1), jnp.float32)
        values: Any = shape((num_out, num_in), bits.dtype)
        return Scaled(values, scales=scales, block=(1, num_in))
    if num_in % bits.group:
        return None
    form = FourBits(bits.group)
    values = shape((num_out, form.width(num_in)), jnp.uint8)
    scales = shape((form.num_groups(num_in), num_out), x.values.dtype)
    others: Any = {"zeros": None, "factors": None, "order": None}
    return Packed(values, scales=scales, **others, num_in=num_in, form=form)


def _merged(x: Dense, bits: Bits) -> Weight | None:
    form: Any = _matrix(x, bits)
    return form and replace(form, parts=x.parts, axis=x.axis)


def _experts(x: ExpertMatrices, bits: Bits) -> Weight | None:
    if bits.group is not None:
        return None
    num_experts, num_in, num_out = x.values.shape
    values: Any = jax.ShapeDtypeStruct((num_experts, num_out, num_in), bits.dtype)
    scales: Any = jax.ShapeDtypeStruct((num_experts, num_out, 1), jnp.float32)
    return ScaledExperts(values, x.axis, scales=scales, block=(1, num_in))


# By class of unquantised weights: a function that returns the `form` for `_quantise`; None if the
# weight cannot have such numbers.
_FORMS: dict[type, Callable[[Any, Bits], Weight | None]] = {
    Dense: _merged,
    Table: _matrix,
    ExpertMatrices: _experts,
}
