"""Parameters of a model from the tensors of a checkpoint: one check of all, then one at a time."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.finite import FLOATS, all_finite
from specjax.checkpoint.spec import TensorSpec

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
    rename: Callable[[str], str] = keep_name,
    ignore: Callable[[str], bool] = ignore_none,
) -> Any:
    """The tree `specs` of `TensorSpec` as a tree of `jax.Array` in `dtype`.

    Host memory peaks near the largest array, as each goes to the device before the next is read.

    Args:
        rename: The name in the files of a name in the specs.
        ignore: Whether a tensor in the files, by its name there, may go unused.

    Raises:
        CheckpointError: Before any tensor is read, with all that are missing, wrong or unused; or
            afterwards, with those that hold NaN or infinity.
    """
    leaves = jax.tree.leaves(specs)
    _check(files, leaves, rename, ignore)
    checks = []

    def load(spec: TensorSpec) -> jax.Array:
        parts = (files.read(rename(name)) for name in spec.names)
        # JAX may keep the array's memory as its own, so it must be fresh; and may still be
        # copying it, so wait before the next one is allocated.
        array = jax.block_until_ready(jax.device_put(spec.assemble(parts, dtype)))
        checks.append(looker.submit(all_finite, array))
        return array

    with ThreadPoolExecutor(1) as looker:  # while the next array is read
        params = jax.tree.map(load, specs)
    are_finite = jax.device_get([check.result() for check in checks])
    bad = [spec for spec, is_finite in zip(leaves, are_finite, strict=True) if not is_finite]
    _refuse_non_finite(files, bad, rename, dtype)
    return params


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
