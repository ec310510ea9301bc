"""Reads weights that another process saved, as Hugging Face files or an orbax checkpoint."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.given import paths
from specjax.checkpoint.hub import resolve

_ORBAX = "_METADATA"  # a file that every orbax checkpoint of arrays has


def read_weights(folder: str | Path, under: str = "") -> dict[str, np.ndarray]:
    """Read the weights in a folder into host memory, and return them by name.

    Args:
        folder: a folder with the weights of a Hugging Face checkpoint, or an orbax checkpoint. An
            orbax checkpoint is written by `StandardCheckpointer` or `PyTreeCheckpointer`, or is
            one step of a `CheckpointManager`.
        under: for orbax, the dotted path of the part that has the weights, like "params". Other
            parts, such as an optimiser's state, are not read. The returned names begin below this
            path.

    Raises:
        CheckpointError: the folder has no weights or nothing at the path `under`, or the weights
            are damaged.
        ImportError: the folder is an orbax checkpoint, and orbax is not installed.
    """
    path = resolve(Path(folder))
    item = _orbax_item(path)
    if item is not None:
        return _read_orbax(item, under)
    if under:
        raise CheckpointError(f"{path} is not of orbax, so under={under!r} names nothing in it")
    files = open_checkpoint(path)
    return {name: files.read(name) for name in files.names()}


def _orbax_item(folder: Path) -> Path | None:
    """Return the folder with the arrays of an orbax checkpoint: `folder` or a folder inside it.

    Return None if `folder` has no orbax checkpoint.

    Raises:
        CheckpointError: `folder` has several checkpoints.
    """
    if (folder / _ORBAX).exists():
        return folder
    items = sorted(path.parent for path in folder.glob(f"*/{_ORBAX}"))
    if len(items) == 1:
        return items[0]
    steps = sorted({path.parent.parent for path in folder.glob(f"*/*/{_ORBAX}")})
    if items or steps:
        names = ", ".join(path.name for path in items or steps)
        raise CheckpointError(f"{folder} holds several checkpoints ({names}); name one of them")
    return None


def _read_orbax(folder: Path, under: str) -> dict[str, np.ndarray]:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(f"{folder} is of orbax; pip install 'specjax[rl]'") from error
    keys = under.split(".") if under else []
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree: Any = reader.metadata(folder.absolute()).item_metadata.tree
        for key in keys:
            if not isinstance(tree, dict) or key not in tree:
                raise CheckpointError(
                    f"{folder} has nothing under {under!r}; the names at its place are "
                    f"{', '.join(map(str, tree)) if isinstance(tree, dict) else 'no mapping'}"
                )
            tree = tree[key]
        for key in reversed(keys):
            tree = {key: tree}
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        arguments = ocp.args.PyTreeRestore(tree, as_numpy, partial_restore=True)
        restored: Any = reader.restore(folder.absolute(), args=arguments)
    for key in keys:
        restored = restored[key]
    return paths(restored)
