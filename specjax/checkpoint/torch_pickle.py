"""Reads torch's `.bin` format, without torch and without running code from the pickle.

Such a file is a zip of uncompressed storages and a pickle that describes tensors in the storages.
A pickle names the Python objects that it needs. Only four kinds of names are allowed here: storage
types, `OrderedDict`, and torch's functions that rebuild a tensor and a parameter. These functions
are replaced by methods that only record their arguments. `locate` checks all tensors against their
storages. Each tensor is read later, on request.
"""

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from specjax.checkpoint.errors import CheckpointError, damaged
from specjax.checkpoint.stored_tensor import StoredTensor, span

_STORAGE_DTYPES = {
    "BoolStorage": np.dtype(np.bool_),
    "ByteStorage": np.dtype(np.uint8),
    "CharStorage": np.dtype(np.int8),
    "ShortStorage": np.dtype(np.int16),
    "IntStorage": np.dtype(np.int32),
    "LongStorage": np.dtype(np.int64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
}
_WRAPPERS = ("state_dict", "model")  # keys under which trainers nest the weights
_LEGACY_START = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
_LOCAL_HEADER = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30  # followed by the member's name and extra field, then its data


def locate(path: Path, ignored: Collection[str] = ()) -> dict[str, StoredTensor]:
    """Return every tensor of the file by name, except tensors with names in `ignored`.

    Raises CheckpointError if the file is damaged, or if its pickle has objects other than tensors.
    Objects with names in `ignored` may be of any type.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return _locate(path, file, archive, ignored)
    except CheckpointError:
        raise
    # A damaged archive or pickle may raise almost any exception, so all exceptions mean damage.
    except Exception as error:
        raise _unreadable(path, error) from error


def _locate(
    path: Path, file: io.BufferedReader, archive: zipfile.ZipFile, ignored: Collection[str]
) -> dict[str, StoredTensor]:
    members = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise damaged(path, "it is a zip without the data.pkl of torch")
    root = pickles[0].removesuffix("data.pkl")
    if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
        raise damaged(path, "it is compressed, which torch never does")
    if f"{root}byteorder" in members and archive.read(f"{root}byteorder") != b"little":
        raise CheckpointError(f"{path} is big-endian; convert it to safetensors")
    stream = archive.read(pickles[0])
    _check_memory(path, stream)
    views = _unwrap(path, _Unpickler(path, io.BytesIO(stream)).load(), ignored)
    return {name: _place(path, file, members, root, name, view) for name, view in views.items()}


class _Storage(NamedTuple):
    dtype: np.dtype
    key: str
    size: int  # number of elements


class _View(NamedTuple):
    storage: _Storage
    offset: int  # number of elements of the storage before the first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    """An unpickler that builds dicts of `_View`s.

    `find_class` returns only immutable objects (strings, a C class, bound methods), because a
    pickle may set attributes of the objects that it gets.
    """

    def __init__(self, path: Path, stream: io.BytesIO):
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGE_DTYPES:
            return name
        match f"{module}.{name}":
            case "collections.OrderedDict":
                return OrderedDict
            case "torch._utils._rebuild_tensor_v2":
                return self._view
            case "torch._utils._rebuild_parameter":
                return self._parameter
            case other:
                raise CheckpointError(
                    f"{self._path} needs {other} to load, but only tensors are loaded from a "
                    "pickle; convert it to safetensors in an environment where you trust it"
                )

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage, key, _, size = pid
        if kind != "storage" or type(key) is not str or type(size) is not int:
            raise ValueError(f"{pid!r} is not a storage")
        return _Storage(_STORAGE_DTYPES[storage], key, size)

    def _view(self, storage, offset, shape, strides, *_) -> _View:
        return _View(storage, offset, shape, strides)

    def _parameter(self, view, *_) -> _View:
        return view


def _check_memory(path: Path, stream: bytes) -> None:
    """Raise an error if unpickling would allocate far more memory than the pickle's length.

    `genops` already rejects strings longer than the remaining pickle. The unpickler's memo, a list
    of the objects so far, is as long as its largest key. So the keys are checked here.
    """
    for opcode, argument, _ in pickletools.genops(stream):
        key = argument if opcode.name in ("PUT", "LONG_BINPUT") else None
        if isinstance(key, int) and key > len(stream):
            raise damaged(path, f"its pickle has {len(stream)} bytes but memo key {key}")


def _unwrap(path: Path, state: Any, ignored: Collection[str]) -> dict[str, _View]:
    """Return the weights of an unpickled file, which may be nested in a dict."""
    for key in _WRAPPERS:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds a {type(state).__name__}, not tensors by name; save a state dict"
        )
    state = {name: view for name, view in state.items() if name not in ignored}
    for name, view in state.items():
        if not isinstance(name, str) or not isinstance(view, _View):
            raise CheckpointError(
                f"{path}: {name!r} is a {type(view).__name__}, not a tensor; save only the tensors "
                "of the state dict"
            )
    return state


def _place(
    path: Path,
    file: io.BufferedReader,
    members: dict[str, zipfile.ZipInfo],
    root: str,
    name: str,
    view: _View,
) -> StoredTensor:
    """Return the location of `view` in the file; check that the view is inside its storage."""
    storage, offset, shape, strides = view
    sizes = [offset, *shape, *strides]
    if (
        not isinstance(storage, _Storage)
        or len(shape) != len(strides)
        or not all(type(size) is int and size >= 0 for size in sizes)
    ):
        raise damaged(path, f"{name} is laid out as {view!r}")
    info = members.get(f"{root}data/{storage.key}")
    if info is None:
        raise damaged(path, f"storage {storage.key} of {name} is missing")
    if info.file_size != storage.size * storage.dtype.itemsize:
        raise damaged(path, f"storage {storage.key} has {info.file_size} bytes, not {storage}")
    if offset + span(tuple(shape), tuple(strides)) > storage.size:
        raise damaged(path, f"{name} reaches past the end of storage {storage.key}: {view!r}")
    begin = _data_start(path, file, info) + offset * storage.dtype.itemsize
    return StoredTensor(path, storage.dtype, tuple(shape), begin, tuple(strides))


def _data_start(path: Path, file: io.BufferedReader, info: zipfile.ZipInfo) -> int:
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    start = file.tell() + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    if header[:4] != _LOCAL_HEADER or start + info.file_size > path.stat().st_size:
        raise damaged(path, f"the zip has no member {info.filename} at byte {info.header_offset}")
    return start


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    with path.open("rb") as file:
        is_legacy = file.read(len(_LEGACY_START)) == _LEGACY_START
    if is_legacy:
        return CheckpointError(
            f"{path} is in the format of torch before 1.6; load it with torch.load and save it as "
            "safetensors, or with a newer torch.save"
        )
    return damaged(path, f"it is not a file of torch.save ({type(error).__name__}: {error})")
