"""Loading of checkpoint tensors as parameters: all are checked first, then read in parallel.

Tensors are copied to the device unchanged, then merged, transposed and cast there.
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

Log = Callable[[str], object]  # takes a line
NUM_READERS = 4  # arrays read concurrently
_MAX_LISTED = 20


def no_log(line: str) -> None:
    """Drop a line: the default `Log`."""


def keep_name(name: str) -> str:
    """Return `name` unchanged: the `rename` for files with the names in the specs."""
    return name


def ignore_none(name: str) -> bool:
    """Return False: the `ignore` for files whose tensors must all be used."""
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
    """Load the tree `specs` of `TensorSpec` as a tree of `jax.Array` in `dtype`.

    At most `NUM_READERS` arrays' tensors are in host memory at a time.

    Args:
        placement: Where arrays are placed; None for `default_device`.
        rename: Maps a name in the specs to the name in the files.
        ignore: Whether a tensor with this name in the files may be unused.

    Raises:
        CheckpointError: Before any read, listing all missing, wrong or unused tensors; or after
            reading, listing tensors with NaN or infinity.
    """
    leaves, tree = jax.tree.flatten(specs)
    _check(files, leaves, rename, ignore)
    placement = placement or Placement.on(default_device())

    def load(spec: TensorSpec) -> tuple[jax.Array, Any]:
        parts = [_narrowed(files.read(rename(name))) for name in spec.names]
        array = lay_out(parts, spec, dtype, placement.sharding(spec.axes))
        is_finite = all_finite(array)
        # Block, so that the host's copy is freed before the next tensors are read.
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
    """Build the array of a spec from its file tensors `parts`, in newly allocated memory.

    Args:
        parts: NumPy arrays, or JAX arrays on any device.
        dtype: Dtype of the array, unless the spec has one.
        sharding: Where the array is placed.
    """
    dtype = np.dtype(spec.dtype or dtype)
    if spec.is_stored and parts[0].dtype == dtype:
        return jax.device_put(parts[0], sharding, may_alias=False)
    on_device = tuple(jax.device_put(part, _whole(sharding)) for part in parts)
    # Layers differ only in tensor names; without names, all share one compiled program.
    return _join(replace(spec, names=("",) * len(parts)), dtype, sharding)(on_device)


def _narrowed(tensor: Any) -> Any:
    """Cast f64, which JAX rejects, to f32; values that are too large become infinite."""
    if tensor.dtype != np.float64:
        return tensor
    with np.errstate(over="ignore"):
        return tensor.astype(np.float32)


def _whole(sharding: Sharding) -> Sharding:
    """Return a sharding that replicates an array on the same devices."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


@lru_cache(maxsize=32)  # each entry holds a compiled program
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
    shapes, packed = {}, set()
    for spec in specs:
        shapes |= zip(map(rename, spec.names), spec.file_shapes, strict=True)
        packed |= {*map(rename, spec.names)} if spec.is_packed else set()
    found = files.names()
    faults = {
        "missing": sorted(shapes.keys() - found),
        "wrong shape": [
            f"{name} (expected {list(shapes[name])}, found {list(files.shape(name))})"
            for name in sorted(shapes.keys() & found)
            if files.shape(name) != shapes[name]
        ],
        "not floating point, or 8-bit without scales": [
            f"{name} ({files.dtype(name)})"
            for name in sorted((shapes.keys() - packed) & found)
            if files.dtype(name) not in FLOATS
        ],
        "not bytes": [
            f"{name} ({files.dtype(name)})"
            for name in sorted(packed & found)
            if files.dtype(name) != np.uint8
        ],
        "unexpected": sorted(name for name in found - shapes.keys() if not ignore(name)),
    }
    if any(faults.values()):
        lists = "\n".join(f"  {fault}: {_listed(n)}" for fault, n in faults.items() if n)
        raise CheckpointError(
            f"the weights in {files.folder} do not fit the model:\n{lists}\n"
            "check that config.json and the weights belong together, and match this kind of model"
        )


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
