"""Reads the weights in a Hugging Face folder, in any supported file format."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoint import safetensors_file, torch_pickle
from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError, damaged
from specjax.checkpoint.stored_tensor import Readable, StoredTensor

_LOCATE = {
    ".safetensors": safetensors_file.locate,
    ".bin": torch_pickle.locate,
    ".pt": torch_pickle.locate,
}
_LOOKED_FOR = (
    "model.safetensors.index.json, model.safetensors, another *.safetensors, "
    "pytorch_model.bin.index.json, pytorch_model.bin"
)
_GIT_LFS_START = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a checkpoint, by their names in the files."""

    folder: Path
    tensors: Mapping[str, Readable]

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self.tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by name, without reading them."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without reading it."""
        return self.tensor(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype in which one tensor is read."""
        return self.tensor(name).dtype

    def read(self, name: str) -> Any:
        """Read only this tensor, into a new array of the tensor's dtype."""
        return self.tensor(name).read()

    def equal(self, one: str, other: str) -> bool:
        """Read two tensors; return whether they have the same values, regardless of dtype."""
        if self.shape(one) != self.shape(other):
            return False
        return bool((self.read(one) == self.read(other)).all())

    def tensor(self, name: str) -> Readable:
        """Return one tensor, without reading it. Raises CheckpointError if it does not exist."""
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.folder} has no tensor {name}; check that it is the checkpoint you mean"
            )
        return self.tensors[name]


def open_checkpoint(folder: Path) -> TensorFiles:
    """Open the weights of `folder`. File sizes and headers are checked, but no tensor is read.

    Raises CheckpointError if there are no weights, or a file is missing or damaged.
    """
    folder = Path(folder)
    tensors: dict[str, StoredTensor] = {}
    for path, expected in find_weights(folder).items():
        located = _locate(path)
        names = located.keys() if expected is None else expected
        if lost := sorted(names - located.keys()):
            raise damaged(path, f"the index puts {lost[0]} in it, and {len(lost) - 1} more")
        tensors |= {name: located[name] for name in names}
    return TensorFiles(folder, tensors)


def open_file(path: Path) -> TensorFiles:
    """Open the tensors of one file. Raises CheckpointError if the file is missing or damaged."""
    return TensorFiles(path.parent, _locate(path))


def find_weights(folder: Path) -> dict[Path, frozenset[str] | None]:
    """Return a folder's weight files, each with the names of the tensors to read from it.

    The names come from the index file, such as model.safetensors.index.json. A folder without an
    index file has None instead of names. Raises CheckpointError if there are no weight files, if
    the index names a file that does not exist, or if there are several *.safetensors files, but
    neither an index file nor a file model.safetensors.
    """
    if not folder.is_dir():
        raise CheckpointError(f"no such folder: {folder}; pass a folder in Hugging Face layout")
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        if (folder / f"{stem}{suffix}.index.json").exists():
            return _find_shards(folder, f"{stem}{suffix}.index.json", suffix)
        if (folder / f"{stem}{suffix}").exists():
            return {folder / f"{stem}{suffix}": None}
        others = sorted(folder.glob("*.safetensors")) if suffix == ".safetensors" else []
        if len(others) > 1:
            raise CheckpointError(
                f"{folder} has {', '.join(path.name for path in others)} and no "
                "model.safetensors.index.json to say which to use; add it or keep one file"
            )
        if others:
            return {others[0]: None}
    raise CheckpointError(
        f"{folder} has no weights (looked for {_LOOKED_FOR}); pass the folder that has them"
    )


def _find_shards(folder: Path, index: str, suffix: str) -> dict[Path, frozenset[str] | None]:
    weight_map = read_json(folder, index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise damaged(folder / index, "it has no weight_map")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        # Allow only plain file names, so that an index cannot point outside its folder.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(suffix):
            raise damaged(folder / index, f"its weight_map puts {name} in {shard!r}")
        shards.setdefault(shard, set()).add(name)
    if lost := sorted(shard for shard in shards if not (folder / shard).is_file()):
        raise CheckpointError(
            f"{folder} lacks {', '.join(lost)}, which {index} names; download the missing files"
        )
    return {folder / shard: frozenset(names) for shard, names in shards.items()}


def _locate(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_GIT_LFS_START)) == _GIT_LFS_START
        if not is_pointer:
            return _LOCATE[path.suffix](path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); check the file and its permissions"
        ) from error
    raise CheckpointError(f"{path} is a git-lfs pointer, not weights; run `git lfs pull`")
