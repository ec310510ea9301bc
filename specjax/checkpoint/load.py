"""Parameters of a model from the tensors of a checkpoint: one check of all, then one at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
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
        CheckpointError: Before any tensor is read; names all that are missing, wrong or unused.
    """
    _check(files, jax.tree.leaves(specs), rename, ignore)

    def load(spec: TensorSpec) -> jax.Array:
        parts = (files.read(rename(name)) for name in spec.names)
        # JAX may keep the array's memory as its own, so it must be fresh; and may still be
        # copying it, so wait before the next one is allocated.
        return jax.block_until_ready(jax.device_put(spec.assemble(parts, dtype)))

    return jax.tree.map(load, specs)


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
