"""Resolves a path, demo name or Hugging Face hub id to a checkpoint folder."""

import re
from pathlib import Path

from specjax.checkpoint.demo import NAMES, demo_folders
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import find_weights

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", re.ASCII)
_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "vocab.txt", "merges.txt"]
_TORCH_FILES = ["pytorch_model*.bin"]
_UNUSED_FILES = ["*/*", "consolidated*"]  # other exports of the same weights


def resolve(name_or_path: str | Path) -> Path:
    """Return the folder `name_or_path`, or the folder of the demo or hub id with this name.

    A hub id that is not in the local cache is downloaded.

    Raises CheckpointError if `name_or_path` is none of these, or cannot be downloaded.
    """
    folder = Path(name_or_path).expanduser()
    if str(name_or_path) and folder.is_dir():  # "" would mean the working directory
        return folder
    demos = demo_folders()
    if str(name_or_path) in demos:
        return demos[str(name_or_path)]
    if str(name_or_path) in NAMES:
        raise CheckpointError(
            f"the demo {name_or_path} is not in the wheel of specjax; in a checkout of its "
            "repository run `pip install ./checkpoints` (the package specjax-demos), or pass "
            f"the folder checkpoints/{name_or_path}"
        )
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; pass the folder that contains it")
    if isinstance(name_or_path, Path) or not _HUB_ID.fullmatch(name_or_path):
        raise CheckpointError(
            f"no such folder: {str(name_or_path)!r}; pass a folder with a config.json, a hub id "
            f"like org/name, or a demo: {', '.join(demos) or 'none are here'}"
        )
    # The hub client's exceptions depend on its version and network library.
    try:
        snapshot = _snapshot(name_or_path, _FILES, local_files_only=True)
        find_weights(snapshot)
        return snapshot
    except Exception as error:
        cache_error = error
    try:
        return _download(name_or_path)
    except Exception as error:
        raise CheckpointError(
            f"{name_or_path} is not a folder here, is not complete in the local hub cache "
            f"({_first_line(cache_error)}), and cannot be downloaded ({_first_line(error)}); pass "
            "a folder, set HF_HOME to a cache that has it, or go online (and run `hf auth login` "
            "if it is private)"
        ) from error


def _download(hub_id: str) -> Path:
    snapshot = _snapshot(hub_id, _FILES)
    if not any(snapshot.glob("*.safetensors")):
        snapshot = _snapshot(hub_id, _FILES + _TORCH_FILES)
    find_weights(snapshot)  # offline, the client may return an incomplete snapshot
    return snapshot


def _snapshot(hub_id: str, files: list[str], *, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download  # takes half a second, so import it late

    return Path(
        snapshot_download(
            hub_id,
            allow_patterns=files,
            ignore_patterns=_UNUSED_FILES,
            local_files_only=local_files_only,
        )
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
