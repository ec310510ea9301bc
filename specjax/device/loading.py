"""Loads checkpoint tensors as parameters.

All tensors are checked first, and then read in parallel. Large tensors are copied to the device
unchanged, and merged, transposed and cast there. For small tensors, the host does this.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from specjax.checkpoint.division import Cut, DividedSpec
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.finite import FLOATS, all_finite
from specjax.checkpoint.spec import TensorSpec
from specjax.checkpoint.stored_tensor import Readable
from specjax.device.placement import (
    DIVIDED,
    REPLICATED,
    Device,
    Placement,
    assemble,
    default_device,
    is_divided,
    own_part,
    own_sharding,
    place_numbers,
    with_other_parts,
)
from specjax.device.resharding import all_devices_of, automatic, devices_of, move, spread
from specjax.device.weights.stored import as_stored

Log = Callable[[str], object]  # takes a line
NUM_READERS = 4  # number of arrays read concurrently
_MAX_LISTED = 20
MAX_JOINED_HERE = 1 << 20  # bytes of an array's tensors that the host merges
MAX_PROGRAMS = 64  # compiled programs of each kind to keep; one checkpoint needs up to 44


def no_log(line: str) -> None:
    """Drop a line. This is the default `Log`."""


def keep_name(name: str) -> str:
    """Return `name` unchanged. Use this as `rename` if the files have the `TensorSpec`s' names."""
    return name


def ignore_none(name: str) -> bool:
    """Return False. Use this as `ignore` if an unused tensor in the files is an error."""
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
    """Return the tree `specs` with an array in `dtype` in the place of each `TensorSpec`.

    Quantised weights keep the numbers and scales that the files store. Weights in a format that no
    matrix product supports are unpacked to `dtype` (see `as_stored`).

    The tensors of at most `NUM_READERS` arrays are in host memory at a time.

    Args:
        placement: Where arrays are placed; None for `default_device`.
        rename: A function that maps a tensor's name in `specs` to its name in the files.
        ignore: A function that takes a tensor's name in the files, and returns whether to ignore
            the tensor if `specs` do not name it.

    Raises:
        CheckpointError: Tensors are missing or unused, have a wrong shape or dtype, or have values
            that are not finite in `dtype`. The message lists the tensors. All checks except the
            check for finite values run before any tensor is read.
    """
    leaves, tree = jax.tree.flatten(as_stored(specs, files, rename))
    _check(files, leaves, rename, ignore)
    placement = placement or Placement.on(default_device())

    def load(spec: TensorSpec) -> tuple[jax.Array, Any]:
        place = DIVIDED if isinstance(spec, DividedSpec) else REPLICATED
        sharding = placement.sharding(place)

        def find(name: str) -> Readable:
            return files.tensor(rename(name))

        if isinstance(spec, DividedSpec) and not sharding.is_fully_addressable:
            parts = spec.read_partly(find)  # other processes have others
        else:
            parts = spec.read(find)
        parts = [_narrowed(part) for part in parts]
        array = lay_out(parts, spec, dtype, sharding)
        is_finite = all_finite(own_part(array))
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
    """Return the array that a `TensorSpec` describes, in newly allocated memory.

    Args:
        parts: The spec's tensors in the files, as NumPy arrays, or JAX arrays on any device.
        spec: Describes how the array is built from `parts`.
        dtype: The array's dtype, unless the spec has a dtype.
        sharding: The devices on which the array is placed, and how it is split over them.
    """
    dtype, own = np.dtype(spec.dtype or dtype), own_sharding(sharding)
    devices = devices_of(parts)
    if not devices and spec.is_stored and parts[0].dtype == dtype:
        whole = jax.device_put(parts[0], own, may_alias=False)
        return with_other_parts(whole, sharding)
    # Layers differ only in tensor names; without names, all share one compiled program.
    spec = replace(spec, names=("",) * len(parts))
    if devices:
        made = _join_afar(spec, dtype, devices)([automatic(part) for part in parts])
        return move(made, sharding)
    if isinstance(spec, DividedSpec) and isinstance(own, NamedSharding):
        if own != sharding or not any(isinstance(part, jax.Array) for part in parts):
            each = [spec.parts(parts, i) for i in place_numbers(sharding)]
            if all(map(_are_small, each)):
                rows = np.stack([_join_here(one, spec.local, dtype) for one in each])
                return with_other_parts(jax.device_put(rows, own), sharding)
            placed = tuple(assemble(one, own) for one in zip(*each, strict=True))
            return with_other_parts(_join_each(spec.local, dtype, own)(placed), sharding)
    if _are_small(parts):
        array = jax.device_put(_join_here(parts, spec, dtype), own, may_alias=False)
        return with_other_parts(array, sharding)
    on_device = tuple(jax.device_put(part, _whole(own)) for part in parts)
    return with_other_parts(_join(spec, dtype, own)(on_device), sharding)


def lay_out_whole(array: Any, spec: DividedSpec, dtype: np.dtype, sharding: Sharding) -> jax.Array:
    """Divide an array over devices as a spec describes; return it in newly allocated memory.

    An undivided array is divided on the devices where it lies. An array that is divided already is
    copied if it has no padding. If it has padding, the host removes the padding, and then divides
    and pads the array again.
    """
    if array.shape == spec.shape and is_divided(array) and not spec.is_padded:
        return _copy(array, dtype, sharding)
    devices = all_devices_of(array)
    if devices and array.shape == spec.whole.shape:
        spec = replace(spec, names=tuple(map(str, range(len(spec.names)))))
        return move(_divide_afar(spec, dtype, devices)([automatic(array)]), sharding)
    known = spec if array.shape == spec.shape else spec.whole
    return lay_out([*known.split(np.asarray(array)).values()], spec, dtype, sharding)


def copy_to(array: Any, dtype: np.dtype, sharding: Sharding) -> jax.Array:
    """Return a copy of `array` in `dtype`, with this sharding.

    `array` is on devices of this process, or on all devices of `sharding`.
    """
    if devices := devices_of([array]):
        return move(_cast_afar(dtype, devices)([automatic(array)]), sharding)
    return _copy(array, dtype, sharding)


def _copy(array: Any, dtype: np.dtype, sharding: Sharding) -> jax.Array:
    own = jax.device_put(own_part(array), own_sharding(sharding), may_alias=False)
    return with_other_parts(own.astype(dtype), sharding)


def _are_small(parts: Sequence[Any]) -> bool:
    """Return whether the host joins these tensors faster than a device's program is compiled."""
    is_here = all(isinstance(part, np.ndarray) for part in parts)
    return is_here and sum(part.nbytes for part in parts) <= MAX_JOINED_HERE


def _join_here(parts: Sequence[np.ndarray], spec: TensorSpec, dtype: np.dtype) -> np.ndarray:
    """Join tensors on the host. Values that are too large for `dtype` become infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(spec.join(parts, dtype), order="C")


def _narrowed(tensor: Any) -> Any:
    """Return `tensor`, cast to f32 if it is f64, which JAX rejects.

    Values that are too large become infinite.
    """
    if tensor.dtype != np.float64:
        return tensor
    with np.errstate(over="ignore"):
        return tensor.astype(np.float32)


def _whole(sharding: Sharding) -> Sharding:
    """Return a sharding that replicates an array on the devices of `sharding`."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


@lru_cache(MAX_PROGRAMS)
def _join(
    spec: TensorSpec, dtype: np.dtype, sharding: Sharding
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    return jax.jit(partial(spec.join, dtype=dtype), out_shardings=sharding)


@lru_cache(MAX_PROGRAMS)
def _join_afar(
    spec: TensorSpec, dtype: np.dtype, devices: tuple[Device, ...]
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Return a jitted function that joins a spec's tensors, which are spread over `devices`."""
    cuts: tuple[Cut | None, ...] = (None,) * len(spec.names)
    num_parts = 0
    if isinstance(spec, DividedSpec):
        cuts, num_parts = spec.tensor_cuts, spec.num_devices
    axes = [None if cut is None else cut.axis for cut in cuts]
    return spread(partial(spec.join, dtype=dtype), devices, axes, num_parts)


@lru_cache(MAX_PROGRAMS)
def _divide_afar(
    spec: DividedSpec, dtype: np.dtype, devices: tuple[Device, ...]
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Return a jitted function that divides an undivided array, which is spread over `devices`."""

    def divide(arrays: Sequence[jax.Array]) -> jax.Array:
        return spec.join([*spec.whole.split(arrays[0]).values()], dtype)

    return spread(divide, devices, [None], spec.num_devices)


@lru_cache(MAX_PROGRAMS)
def _cast_afar(
    dtype: np.dtype, devices: tuple[Device, ...]
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Return a jitted function that casts an array, which is spread over `devices`.

    Each device gets the whole result.
    """
    return spread(lambda arrays: arrays[0].astype(dtype), devices, [None], 0)


@lru_cache(MAX_PROGRAMS)
def _join_each(
    spec: TensorSpec, dtype: np.dtype, sharding: Sharding
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Return a jitted function that joins parts [devices, ...]. Each device joins its own parts."""
    return jax.jit(jax.vmap(partial(spec.join, dtype=dtype)), out_shardings=sharding)


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
        fit = all(all_finite(_narrowed(files.read(name))) for name in names)
        remedy = "load it with dtype='float32'" if fit else "export smaller values"
        raise CheckpointError(
            f"{files.folder} has values in {_listed(names)} that are too large for {dtype}; "
            f"{remedy}"
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
