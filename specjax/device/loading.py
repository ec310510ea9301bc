"""Parameters from the tensors of a checkpoint: one check of all, then several read at a time.

A tensor goes to the device as the file has it, and is merged with others, transposed and cast
there.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.finite import FLOATS, all_finite
from specjax.checkpoint.spec import TensorSpec
from specjax.device.placement import Placement, default_device

NUM_READERS = 4  # arrays that are read at the same time
_MAX_LISTED = 20


def keep_name(name: str) -> str:
    """The `rename` of a checkpoint whose names are those of the specs."""
    return name


def ignore_none(name: str) -> bool:
    """The `ignore` under which every tensor of the files must be used."""
    return False


def load_params(
    files: TensorFiles,
    specs: Any,
    dtype: np.dtype,
    *,
    placement: Placement | None = None,
    rename: Callable[[str], str] = keep_name,
    ignore: Callable[[str], bool] = ignore_none,
) -> Any:
    """The tree `specs` of `TensorSpec` as a tree of `jax.Array` in `dtype`.

    The host holds the tensors of at most `NUM_READERS` arrays at a time.

    Args:
        placement: Where arrays live; None for `default_device`.
        rename: The name in the files of a name in the specs.
        ignore: Whether a tensor in the files, by its name there, may go unused.

    Raises:
        CheckpointError: Before any tensor is read, with all that are missing, wrong or unused; or
            afterwards, with those that hold NaN or infinity.
    """
    leaves, tree = jax.tree.flatten(specs)
    _check(files, leaves, rename, ignore)
    placement = placement or Placement.on(default_device())

    def load(spec: TensorSpec) -> tuple[jax.Array, Any]:
        parts = [_narrowed(files.read(rename(name))) for name in spec.names]
        array = lay_out(parts, spec, dtype, placement.sharding(spec.axes))
        is_finite = all_finite(array)
        # What was read can be let go of when the device has it.
        return jax.block_until_ready(array), is_finite

    with ThreadPoolExecutor(NUM_READERS) as readers:
        futures = [readers.submit(load, spec) for spec in leaves]
        try:
            arrays, checks = zip(*(future.result() for future in futures), strict=True)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
    are_finite = jax.device_get(checks)
    bad = [spec for spec, is_finite in zip(leaves, are_finite, strict=True) if not is_finite]
    _refuse_non_finite(files, bad, rename, dtype)
    return jax.tree.unflatten(tree, arrays)


def lay_out(
    parts: Sequence[Any], spec: TensorSpec, dtype: np.dtype, sharding: Sharding
) -> jax.Array:
    """The array of a spec, in memory of its own, from the tensors `parts` as a file has them.

    Args:
        parts: Arrays of NumPy, or of JAX on any device.
        dtype: Of the array, unless the spec has one.
        sharding: Where the array is to live.
    """
    dtype = np.dtype(spec.dtype or dtype)
    if spec.is_stored and parts[0].dtype == dtype:
        return jax.device_put(parts[0], sharding, may_alias=False)
    on_device = tuple(jax.device_put(part, _whole(sharding)) for part in parts)
    # Layers have tensors of the same shapes under other names: one program joins those of all.
    return _join(replace(spec, names=("",) * len(parts)), dtype, sharding)(on_device)


def _narrowed(tensor: np.ndarray) -> np.ndarray:
    """As f32 if it is f64, which JAX does not take; what is too large for it becomes infinite."""
    if tensor.dtype != np.float64:
        return tensor
    with np.errstate(over="ignore"):
        return tensor.astype(np.float32)


def _whole(sharding: Sharding) -> Sharding:
    """The same devices, each with all of an array."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


@lru_cache(maxsize=32)  # each holds a compiled program
def _join(
    spec: TensorSpec, dtype: np.dtype, sharding: Sharding
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    return jax.jit(partial(spec.join, dtype=dtype), out_shardings=sharding)


def _refuse_non_finite(
    files: TensorFiles, bad: Sequence[TensorSpec], rename: Callable[[str], str], dtype: np.dtype
) -> None:
    names = [rename(name) for spec in bad for name in spec.names]
    if found := [name for name in names if not all_finite(files.read(name))]:
        raise CheckpointError(
            f"{files.folder} has NaN or infinity in {_listed(found)}; download or export the "
            "checkpoint again"
        )
    if bad:
        raise CheckpointError(
            f"{files.folder} has values in {_listed(names)} that are too large for {dtype}; load "
            "it with dtype='float32'"
        )


def _check(
    files: TensorFiles,
    specs: Sequence[TensorSpec],
    rename: Callable[[str], str],
    ignore: Callable[[str], bool],
) -> None:
    shapes = {
        rename(name): shape
        for spec in specs
        for name, shape in zip(spec.names, spec.file_shapes, strict=True)
    }
    found = files.names()
    faults = {
        "missing": sorted(shapes.keys() - found),
        "wrong shape": [
            f"{name} (expected {list(shapes[name])}, found {list(files.shape(name))})"
            for name in sorted(shapes.keys() & found)
            if files.shape(name) != shapes[name]
        ],
        "not of floating point, or of 8 bits without their scales": [
            f"{name} ({files.dtype(name)})"
            for name in sorted(shapes.keys() & found)
            if files.dtype(name) not in FLOATS
        ],
        "unexpected": sorted(name for name in found - shapes.keys() if not ignore(name)),
    }
    if any(faults.values()):
        lists = "\n".join(f"  {fault}: {_listed(n)}" for fault, n in faults.items() if n)
        raise CheckpointError(
            f"the weights in {files.folder} do not fit the model:\n{lists}\n"
            "check that config.json and the weights belong together, and to this kind of model"
        )


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
