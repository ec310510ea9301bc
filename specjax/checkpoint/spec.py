"""How one engine array is made from the tensors of a checkpoint file, and back.

A model describes its parameters as a pytree of `TensorSpec` with the structure of the parameters
themselves, so loading, exporting, initialising and checking are each one walk over that tree.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TensorSpec:
    """An engine array as file tensors laid end to end along their first axis, then transposed.

    Checkpoints store projections as [out, in]; the engine holds [in, out], projections that share
    an input merged into one.
    """

    names: tuple[str, ...]
    file_shapes: tuple[tuple[int, ...], ...]
    transpose: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the engine array."""
        rows = sum(shape[0] for shape in self.file_shapes)
        shape = (rows, *self.file_shapes[0][1:])
        return shape[::-1] if self.transpose else shape

    def assemble(self, parts: Iterable[np.ndarray], dtype: np.dtype) -> np.ndarray:
        """The engine array, freshly allocated in `dtype`, from `parts`, taken one at a time."""
        array = np.empty(self.shape, dtype)
        target = array.T if self.transpose else array
        row = 0
        for part in parts:
            target[row : row + part.shape[0]] = part
            row += part.shape[0]
        return array

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """The file tensors, by name, that `assemble` would turn into `array`."""
        source = array.T if self.transpose else array
        ends = np.cumsum([shape[0] for shape in self.file_shapes])[:-1]
        return {
            name: np.ascontiguousarray(part)
            for name, part in zip(self.names, np.split(source, ends), strict=True)
        }


# Both are typed Any, as they stand in a parameter tree where the arrays will stand.
def linear(names: Sequence[str], num_in: int, num_outs: Sequence[int]) -> Any:
    """Projections [out, in] that share an input, merged into one [in, sum of outs]."""
    return TensorSpec(tuple(names), tuple((n, num_in) for n in num_outs), transpose=True)


def stored(names: Sequence[str], *shapes: tuple[int, ...]) -> Any:
    """Tensors kept as the file has them (norms, biases, embeddings), laid end to end."""
    return TensorSpec(tuple(names), shapes)
