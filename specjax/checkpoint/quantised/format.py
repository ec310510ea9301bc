"""The interface of formats of quantised weights, and functions that several formats use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.stored_tensor import Readable


class Format(Protocol):
    """A format of quantised weights.

    The fields of a format hold settings that are read from a checkpoint's config.
    """

    described: ClassVar[str]  # for errors: what is supported

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self | None:
        """Return the format that `config`, a `quantization_config`, describes.

        Return None if `config` describes another format, or uses unsupported settings.
        """
        ...

    def join(self, files: TensorFiles, dtype: np.dtype) -> TensorFiles:
        """Return `files`, with one tensor instead of the several tensors of each quantised matrix.

        This tensor has the name that the unquantised matrix would have. Reading it returns the
        weights in `dtype`. The tensors, not the config, decide which matrices are quantised.

        Raises:
            CheckpointError: tensors are missing, or have a wrong shape; the error names them.
        """
        ...

    def stored(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype
    ) -> Mapping[str, Readable] | None:
        """Return, by name, the tensors that store the matrix `name` according to the config.

        Values that the config does not determine are 0. The result is None if the matrix is not
        quantised, or if the config does not say how it is stored. `shape` [..., O, I] and `dtype`
        are the shape and dtype of the matrix before quantisation.
        """
        ...


@dataclass(frozen=True)
class Converted:
    """A tensor that is converted when it is read."""

    source: Readable
    convert: Callable[[Any], Any]
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def path(self) -> Path:
        """The tensor's file."""
        return self.source.path

    def read(self) -> Any:
        """Return the converted tensor."""
        return self.convert(self.source.read())


def take(tensors: dict[str, Readable], folder: Path, name: str, of: str) -> Readable:
    """Remove the tensor `name` from `tensors`, and return it.

    `of` is the name of another tensor of the same matrix, for the error.

    Raises:
        CheckpointError: there is no such tensor.
    """
    if name not in tensors:
        raise CheckpointError(
            f"{folder} has no tensor {name}, which {of} needs; download or export the checkpoint "
            "again"
        )
    return tensors.pop(name)


def check_shape(folder: Path, name: str, of: str, found: Readable, *shapes: Any) -> None:
    """Raise a CheckpointError unless the tensor `found`, called `name`, has one of `shapes`.

    `of` describes the matrix to which the tensor belongs, for example by its name and shape. The
    message contains `name` and `of`.
    """
    if found.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise CheckpointError(
            f"{folder}: {name} must be {wanted} for {of}; got {list(found.shape)}"
        )


def check_axes(folder: Path, name: str, found: Readable, count: int = 2) -> None:
    """Raise a CheckpointError unless the tensor `found`, called `name`, has `count` axes."""
    if len(found.shape) != count:
        raise CheckpointError(
            f"{folder}: {name} must be an array with {count} axes; got {list(found.shape)}"
        )


def read_positive(scales: Readable, name: str, *, may_be_zero: bool = False) -> np.ndarray:
    """Check scales, and return them as they are stored. `name` is the name of their tensor.

    A stored u8 value e means the scale 2^(e - 127), or NaN if e is 255.

    Raises:
        CheckpointError: a stored value is negative, infinite, NaN, or zero. Zeros are allowed if
            `may_be_zero` is true.
    """
    found = scales.read()
    wide = np.asarray(found, np.float32)
    if found.dtype == np.uint8:  # exponents of powers of two
        wide = np.where(found == 255, np.nan, wide)
    if not (np.isfinite(wide) & ((wide > 0) | (may_be_zero & (wide == 0)))).all():
        raise CheckpointError(
            f"{scales.path}: {name} has scales that are not positive numbers; "
            "download or export the checkpoint again"
        )
    return found


def group_size(depth: int, count: int, likely: int | None = None) -> int | None:
    """Return the number of inputs in a group, if `depth` inputs are divided into `count` groups.

    For one group, this is `depth`. For more groups, it is `likely` if `depth` inputs have `count`
    groups of this size, perhaps with a smaller last group. Otherwise, all groups must have the same
    size; the result is None if `count` does not divide `depth`.
    """
    if count == 1:
        return depth
    if likely and likely > 0 and -(-depth // likely) == count:
        return likely
    return depth // count if count and depth % count == 0 else None
