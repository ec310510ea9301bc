"""Arrays that a program passes in: those of NumPy, JAX or another library, such as torch.

Another library is never imported: its arrays are read by the DLPack protocol, and torch tensors are
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
    """Return an array of any library as one of JAX or NumPy, without a copy where possible.

    What JAX traces passes unchanged.

    Args:
        name, owner: the array's name, and what it belongs to, for errors.

    Raises:
        ValueError: it is not an array, or its values cannot be read here; tells a remedy.
    """
    try:
        problem = _problem(array)
        if not problem:
            return _read(array)
    except Exception as error:  # libraries raise many types of errors, without the array's name
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        problem = f"cannot be read ({reason}); pass it as a NumPy array, or on the CPU"
    raise ValueError(f"{name} of the {owner} {problem}")


def as_arrays(tree: Any, owner: str) -> Any:
    """Return a tree with each leaf as by `as_array`; leaves are named by their paths.

    Raises:
        ValueError: as `as_array`.
    """
    return jax.tree.map_with_path(lambda path, leaf: as_array(leaf, dotted(path), owner), tree)


def paths(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path, like "layers.0.attention.qkv", in tree order."""
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def dotted(path: tuple[Any, ...]) -> str:
    """Return a path of JAX's tree functions as text; keys without text are left out."""
    keys = filter(str, path)
    names = (getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in keys)
    return ".".join(map(str, names))


def _problem(array: Any) -> str | None:
    """Return why an array has no values that can be read here, and a remedy; None if it has."""
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
    """See `_problem`."""
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
    if hasattr(array, "requires_grad"):  # XLA reads neither gradients nor gaps between rows
        array = array.detach().resolve_conj().resolve_neg().contiguous()
    return _in_row_order(jnp.from_dlpack(array))


def _in_row_order(array: Any) -> jax.Array:
    """Return the array with its elements in the order of its axes, as a transposed view has not.

    Copies of others by `jax.device_put(may_alias=False)` are read wrongly (jax 0.10.2, CPU).
    """
    layout, order = array.format.layout, tuple(range(array.ndim))
    if layout is None or layout.major_to_minor == order:  # None: it was deleted
        return array
    return jax.device_put(array, Format(Layout(order), array.sharding))
