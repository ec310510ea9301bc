"""Reads arrays from users, made by NumPy, JAX or another library such as torch.

The other library is not imported: its arrays are read by the DLPack protocol, and torch tensors are
recognised by their methods.
"""

import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Format, Layout


def as_array(array: Any, name: str, owner: str) -> jax.Array | np.ndarray:
    """Return an array of any library as a JAX or NumPy array.

    The values are copied only if necessary. Arrays traced by JAX are returned unchanged.

    Args:
        name: the array's name in errors.
        owner: the name of the object that contains the array, in errors.

    Raises:
        ValueError: `array` is not an array, or this process cannot read its values. The message has
            a remedy.
    """
    try:
        problem = _problem(array)
        if not problem:
            return _read(array)
    except Exception as error:  # libraries raise many error types, without the array's name
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        problem = f"cannot be read ({reason}); pass it as a NumPy array, or on the CPU"
    raise ValueError(f"{name} of the {owner} {problem}")


def as_arrays(tree: Any, owner: str) -> Any:
    """Apply `as_array` to each leaf of a tree; errors name leaves by path.

    Raises:
        ValueError: as for `as_array`.
    """
    return jax.tree.map_with_path(lambda path, leaf: as_array(leaf, dotted(path), owner), tree)


def paths(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path, like "layers.0.attention.qkv", in tree order."""
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def dotted(path: tuple[Any, ...]) -> str:
    """Return a path from JAX's tree functions as text, without empty keys."""
    keys = filter(str, path)
    names = (getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in keys)
    return ".".join(map(str, names))


def _problem(array: Any) -> str | None:
    """Return why an array's values cannot be read, and a remedy; None if they can be read."""
    if isinstance(array, Tracer):
        return None
    if isinstance(array, jax.Array):
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            return "is a random key; pass parameters only, such as nnx.state(model, nnx.Param)"
        if not array.is_fully_addressable:
            return "is split over processes; gather it first (multihost_utils.process_allgather)"
        return None
    if isinstance(array, np.ma.MaskedArray):
        return "is masked; pass its filled()"
    if not (hasattr(array, "shape") and hasattr(array, "dtype")) or isinstance(
        array, jax.ShapeDtypeStruct
    ):
        return f"is {reprlib.repr(array)}, which is not an array"
    return _problem_of_torch(array) if hasattr(array, "requires_grad") else None


def _problem_of_torch(tensor: Any) -> str | None:
    """Return why a torch tensor's values cannot be read, and a remedy; None if they can be read."""
    if hasattr(tensor, "full_tensor"):
        return "is split over processes (a DTensor); pass its full_tensor()"
    if tensor.device.type == "meta" or hasattr(tensor, "fake_mode"):
        return "has no values (it is on the meta device); load the weights first"
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype}); pass its dequantize()"
    if not str(tensor.layout).endswith("strided"):
        return f"is sparse ({tensor.layout}); pass its to_dense()"
    return None


def _read(array: Any) -> jax.Array | np.ndarray:
    if isinstance(array, Tracer):
        return array
    if isinstance(array, jax.Array):
        return _in_row_order(array)
    if isinstance(array, np.ndarray | np.generic):
        whole = np.asarray(array)
        whole = whole if whole.dtype.isnative else whole.astype(whole.dtype.newbyteorder("="))
        jax.device_put(np.zeros((), whole.dtype))  # an error if JAX has no such dtype
        return whole
    if hasattr(array, "requires_grad"):  # XLA supports neither gradients nor gaps between rows
        array = array.detach().resolve_conj().resolve_neg().contiguous()
    return _in_row_order(jnp.from_dlpack(array))


def _in_row_order(array: Any) -> jax.Array:
    """Return the array in row-major memory. An array with another layout is copied.

    For example, a transposed view has another layout. `jax.device_put(may_alias=False)` would copy
    such an array wrongly (jax 0.10.2, CPU).
    """
    layout, order = array.format.layout, tuple(range(array.ndim))
    if layout is None or layout.major_to_minor == order:  # the layout of a deleted array is None
        return array
    return jax.device_put(array, Format(Layout(order), array.sharding))
