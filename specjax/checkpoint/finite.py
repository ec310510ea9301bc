"""Checks arrays for NaN and infinity. Each array is read only once."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

_CHUNK = 2**18  # elements; small enough for the CPU's cache
_INTEGERS = {
    1: (np.int8, np.uint8),
    2: (np.int16, np.uint16),
    4: (np.int32, np.uint32),
    8: (np.int64, np.uint64),
}
# Dtypes of unquantised weights.
FLOATS = frozenset(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)))
_CHECKED = FLOATS | {np.dtype(ml_dtypes.float8_e4m3fn)}


def all_finite(array: Any, dtype: np.dtype | None = None) -> Any:
    """Return whether all elements are finite, and stay finite if they are cast to `dtype`.

    If `dtype` is None, elements are not cast.

    The result is a bool, or an array bool[] on a device, which `jax.device_get` converts to a bool.
    Only floats of 16 bits or more, and float8_e4m3fn, are checked. Arrays of other dtypes count as
    finite.
    """
    own = np.dtype(array.dtype)
    if own not in _CHECKED:
        return True
    largest = _largest(own, own if dtype is None else dtype)
    if not isinstance(array, jax.Array):
        return _on_host(np.asarray(array), largest)
    if not _is_near(array):
        return _on_device(array, largest)
    if len(array.devices()) == 1:  # JAX would keep its only shard as another array
        return _on_host(np.asarray(array), largest)
    shards = (shard for shard in array.addressable_shards if not shard.replica_id)
    return all(_on_host(np.asarray(shard.data), largest) for shard in shards)


def _largest(own: np.dtype, dtype: np.dtype) -> np.ndarray:
    """Return the largest finite number of both dtypes, as an array of dtype `own`."""
    return np.array(min(float(ml_dtypes.finfo(kind).max) for kind in (own, dtype)), own)


def _is_near(array: jax.Array) -> bool:
    """Return whether all shards are in the memory of this process's CPU."""
    return array.is_fully_addressable and all(d.platform == "cpu" for d in array.devices())


def _on_host(array: np.ndarray, largest: np.ndarray) -> bool:
    # Compare integers, because NumPy is slow with bfloat16 and XLA's reductions are slow on a CPU.
    # Larger numbers have larger bits, and infinity and NaN have the largest: as signed integers if
    # positive, and as unsigned integers if negative.
    signed, unsigned = _INTEGERS[array.dtype.itemsize]
    flat = np.ascontiguousarray(array).reshape(-1)
    for i in range(0, len(flat), _CHUNK):
        chunk = flat[i : i + _CHUNK]
        if chunk.view(signed).max() > largest.view(signed):
            return False
        if chunk.view(unsigned).max() > np.negative(largest).view(unsigned):
            return False
    return True


@jax.jit
def _on_device(array: jax.Array, largest: np.ndarray) -> jax.Array:
    return (jnp.abs(array) <= largest).all()  # false for NaN


def check_params(params: Any) -> None:
    """Check that a pytree has no NaN or infinity.

    Raises:
        ValueError: `params` has NaN or infinity; the message names the arrays.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    are_finite = jax.device_get([all_finite(leaf) for _, leaf in leaves])
    bad = [path for (path, _), ok in zip(leaves, are_finite, strict=True) if not ok]
    if bad:
        names = ", ".join(jax.tree_util.keystr(path) for path in bad[:5])
        raise ValueError(
            f"params has NaN or infinity in {names}; pass the parameters of a working model"
        )
