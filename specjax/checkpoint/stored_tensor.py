"""Reads tensors at known locations in files. Readers of safetensors and of .bin files use it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specjax.checkpoint.errors import CheckpointError, damaged


class Readable(Protocol):
    """A tensor that is read on request."""

    @property
    def path(self) -> Path: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> Any:
        """Return the tensor as a new NumPy or JAX array."""
        ...


@dataclass(frozen=True)
class StoredTensor:
    """A little-endian tensor in a file. The file is open only while the tensor is read."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file to element [0, 0, ...]
    strides: tuple[int, ...] | None = None  # in elements; None if C-contiguous

    def map(self) -> np.ndarray:
        """Return a read-only array whose parts are read from the file when they are used.

        A tensor that is not C-contiguous is read at once.
        """
        if 0 in self.shape or self.strides not in (None, contiguous_strides(self.shape)):
            return self.read()
        try:
            return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)
        except (OSError, ValueError) as error:  # ValueError: it became shorter
            raise CheckpointError(
                f"{self.path} cannot be read ({error}); check the file and its permissions"
            ) from error

    def read(self) -> np.ndarray:
        """Read the tensor into a new, writable, C-contiguous array."""
        strides = contiguous_strides(self.shape) if self.strides is None else self.strides
        count = span(self.shape, strides)
        try:
            flat = np.fromfile(self.path, self.dtype, count, offset=self.offset)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read ({error}); check the file and its permissions"
            ) from error
        if flat.size < count:
            raise damaged(self.path, "it became shorter after it was opened")
        if strides == contiguous_strides(self.shape):
            return flat.reshape(self.shape)
        byte_strides = [stride * flat.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(flat, self.shape, byte_strides).copy(order="C")


def read_partly(tensor: Readable) -> Any:
    """Return a tensor for a caller that uses only parts of it.

    A `StoredTensor` is mapped into memory. Any other tensor, such as a converted one, is read.
    """
    return tensor.map() if isinstance(tensor, StoredTensor) else tensor.read()


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a C-contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of elements from a strided tensor's first to its last, inclusive."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
