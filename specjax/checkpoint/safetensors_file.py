"""The safetensors format: a JSON table of offsets, then the tensors' bytes.

Only the table stays in memory; tensors are read and written one at a time. (The `safetensors`
package maps the whole file to read it, needs all tensors in memory to write them, and cannot
return float8 as NumPy arrays.)
"""

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from specjax.checkpoint.errors import CheckpointError, damaged
from specjax.checkpoint.stored_tensor import StoredTensor

_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's limit


def locate(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the file by name. Raises CheckpointError unless the table is valid.

    In a valid table, the tensors fill the file to its end, without gaps or overlaps.
    """
    header, start = _read_header(path)
    header.pop("__metadata__", None)
    tensors = {name: _locate_one(path, name, entry, start) for name, entry in header.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, _num_bytes(t))):
        if tensor.offset != end:
            raise damaged(path, "its tensors overlap or leave gaps")
        end += _num_bytes(tensor)
    if end != path.stat().st_size:
        raise damaged(path, f"it has {path.stat().st_size} bytes, but its table describes {end}")
    return tensors


def write(
    path: Path,
    layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Write a file with the dtypes and shapes of `layout`.

    `tensors` must yield one pair (name, tensor) for each name of `layout`, in any order. The
    tensors are written one at a time.

    Raises:
        CheckpointError: safetensors cannot store a dtype of `layout`.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    # Widest dtypes first, so that every tensor is aligned to its element size, as readers expect.
    for name, (dtype, shape) in sorted(layout.items(), key=lambda item: -item[1][0].itemsize):
        begins[name], end = end, end + prod(shape) * dtype.itemsize
        if dtype not in _NAMES:
            raise CheckpointError(f"{name} is {dtype}, which safetensors cannot store; cast it")
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begins[name], end],
        }
    table = json.dumps(header).encode()
    table += b" " * (-len(table) % 8)
    with path.open("wb") as file:
        file.write(len(table).to_bytes(8, "little") + table)
        for name, tensor in tensors:
            assert (tensor.dtype, tensor.shape) == layout[name]
            file.seek(8 + len(table) + begins.pop(name))
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        assert not begins
        file.flush()
        os.fsync(file.fileno())


def _read_header(path: Path) -> tuple[dict[str, object], int]:
    """Return the JSON table at the file's start, and the offset of the first byte after it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        room = path.stat().st_size - 8
        if not 2 <= length <= min(room, _MAX_HEADER_BYTES):
            raise damaged(path, f"its table cannot be {length} bytes long, {max(room, 0)} follow")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise damaged(path, f"its table is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise damaged(path, "its table is not a JSON object")
    return header, 8 + length


def _locate_one(path: Path, name: str, entry: object, start: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise damaged(path, f"the table's entry for {name} is {entry!r}")
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"{path}: {name} has dtype {dtype}, which is not supported; export the checkpoint in "
            "float32, float16 or bfloat16"
        )
    sizes_are_valid = all(type(size) is int and size >= 0 for size in shape)
    if not sizes_are_valid or begin < 0 or end - begin != prod(shape) * _DTYPES[dtype].itemsize:
        raise damaged(path, f"bytes {begin} to {end} cannot hold {name}, {dtype}{shape}")
    return StoredTensor(path, _DTYPES[dtype], tuple(shape), start + begin)


def _num_bytes(tensor: StoredTensor) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize
