"""Specs that build engine arrays from a checkpoint's tensors, and convert the arrays back.

A model describes its parameters as a pytree of `TensorSpec` with the structure of the parameters,
so loading, exporting, initialising and checking each walk that tree once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class TensorSpec:
    """An engine array: file tensors that are concatenated along their first axis, then transposed.

    Checkpoints store projections as [out, in]; the engine uses [in, out], and merges projections
    with the same input.

    Attributes:
        names: the names of the file tensors.
        file_shapes: the shapes of the file tensors.
        transpose: whether to swap the last two axes.
        interleaved: () if the file tensors have the engine's order of rows. Else, for each tensor,
            the number of rows of each part; parts alternate in the tensor, one group of parts per
            head. The engine has all rows of the first part, then all rows of the second, and so on.
            () for a tensor that has the engine's order.
        num_stacked: the number of equal groups of tensors, such as experts, that are stacked along
            a new leading axis; 0 without such an axis.
        is_squeezed: whether to drop the second axis, which has size one.
        dtype: the fixed dtype of the array; None for the model's dtype.
        fill: the initial value for training; None for random matrices and for norms of one.
        is_buffer: whether the tensor is a buffer in torch and not a parameter. Trainers may leave a
            buffer out; a weight update without the buffer keeps its value.
        axes: for each axis of the array, the logical name by which a `Placement` may shard it
            ("vocab", "heads", "mlp", "experts"), or None; () for an array that is never sharded.
    """

    names: tuple[str, ...]
    file_shapes: tuple[tuple[int, ...], ...]
    transpose: bool = False
    interleaved: tuple[tuple[int, ...], ...] = ()
    num_stacked: int = 0
    is_squeezed: bool = False
    dtype: str | None = None
    fill: float | None = None
    is_buffer: bool = False
    axes: tuple[str | None, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the engine array."""
        rows = sum(shape[0] for shape in self.file_shapes)
        inner = self._row_shape
        shape = (rows, *inner)
        if self.num_stacked:
            shape = (self.num_stacked, rows // self.num_stacked, *inner)
        return (*shape[:-2], *shape[:-3:-1]) if self.transpose else shape

    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """Return the file tensors in the order of `names`; `find` takes a name, see `Readable`."""
        return [find(name).read() for name in self.names]

    def join(self, parts: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
        """Return the engine array in `dtype`, from the file tensors in the order of `names`."""
        # Cast each part, since a file may contain several dtypes.
        cast = (part.astype(self.dtype or dtype) for part in parts)
        pairs = zip(cast, self.file_shapes, self._interleaved, strict=True)
        rows = [
            _regroup(part.reshape(shape[0], *self._row_shape), sizes)
            for part, shape, sizes in pairs
        ]
        per_run = len(rows) // max(1, self.num_stacked)
        runs = [jnp.concatenate(rows[i : i + per_run]) for i in range(0, len(rows), per_run)]
        array = jnp.stack(runs) if self.num_stacked else runs[0]
        return array.swapaxes(-1, -2) if self.transpose else array

    @property
    def is_stored(self) -> bool:
        """Whether the array is a single tensor of the file, unchanged."""
        return (
            len(self.names) == 1
            and self.file_shapes[0] == self.shape
            and not (self.transpose or any(self.interleaved))
        )

    @property
    def is_packed(self) -> bool:
        """Whether the file tensors are bytes that `join` unpacks to numbers."""
        return False

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return the file tensors, by name, from which `join` would build `array`."""
        parts = zip(
            self.names, self.file_shapes, self._interleaved, self._places(array), strict=True
        )
        return {
            name: np.ascontiguousarray(_interleave(place, sizes)).reshape(shape)
            for name, shape, sizes, place in parts
        }

    @property
    def _row_shape(self) -> tuple[int, ...]:
        inner = self.file_shapes[0][1:]
        return inner[1:] if self.is_squeezed else inner

    @property
    def _interleaved(self) -> tuple[tuple[int, ...], ...]:
        return self.interleaved or ((),) * len(self.names)

    def _places(self, array: np.ndarray) -> list[np.ndarray]:
        """Return the part of `array` that belongs to each file tensor, as a list of views."""
        rows = array.swapaxes(-1, -2) if self.transpose else array
        runs = list(rows) if self.num_stacked else [rows]
        per_run = len(self.names) // len(runs)
        ends = accumulate((shape[0] for shape in self.file_shapes[:per_run]), initial=0)
        bounds = list(pairwise(ends))
        return [run[start:end] for run in runs for start, end in bounds]


def _regroup(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """Reorder rows in which parts of these sizes alternate, so that each part is contiguous."""
    if not sizes:
        return x
    groups = x.reshape(-1, sum(sizes), *x.shape[1:])
    parts = jnp.split(groups, np.cumsum(sizes)[:-1], axis=1)
    return jnp.concatenate([part.reshape(-1, *x.shape[1:]) for part in parts])


def _interleave(x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Invert `_regroup`."""
    if not sizes:
        return x
    num_groups = len(x) // sum(sizes)
    parts = np.split(x, np.cumsum(sizes)[:-1] * num_groups)
    groups = [part.reshape(num_groups, -1, *x.shape[1:]) for part in parts]
    return np.concatenate(groups, axis=1).reshape(x.shape)


# These functions return Any, because specs replace arrays in a tree of parameters.
def projection(
    names: Sequence[str],
    num_in: int,
    num_outs: Sequence[int],
    interleaved: Mapping[str, tuple[int, ...]] | None = None,
    axes: tuple[str | None, str | None] = (None, None),
) -> Any:
    """Return the spec that merges projections [out, in] of the same input to [in, sum of outs].

    `interleaved` has, by tensor name, the sizes of the parts whose rows alternate in the file.
    `axes` are the names of the merged array's axes.
    """
    sizes = tuple((interleaved or {}).get(name, ()) for name in names)
    return TensorSpec(
        tuple(names),
        tuple((n, num_in) for n in num_outs),
        transpose=True,
        interleaved=sizes if any(sizes) else (),
        axes=axes,
    )


def stored(
    names: Sequence[str],
    *shapes: tuple[int, ...],
    fill: float | None = None,
    axes: tuple[str | None, ...] = (),
) -> Any:
    """Return the spec of tensors that are only concatenated (norms, biases, embeddings)."""
    return TensorSpec(tuple(names), shapes, fill=fill, axes=axes)


def depthwise(name: str, channels: int, taps: int, axis: str | None = None) -> Any:
    """Return the spec of depthwise convolution weights [taps, channels].

    The file tensor is [channels, 1, taps].
    """
    shapes = ((channels, 1, taps),)
    return TensorSpec((name,), shapes, transpose=True, is_squeezed=True, axes=(None, axis))


def experts(names: Sequence[Sequence[str]], num_in: int, num_outs: Sequence[int]) -> Any:
    """Return the spec of all experts' merged projections, stacked to [experts, in, sum of outs]."""
    return TensorSpec(
        tuple(name for one in names for name in one),
        tuple((n, num_in) for _ in names for n in num_outs),
        transpose=True,
        num_stacked=len(names),
        axes=("experts", None, None),
    )


def fused_experts(
    name: str, num_experts: int, num_in: int, num_out: int, is_swapped: bool = False
) -> Any:
    """Return the spec of experts that are stored in one tensor, as an array [experts, in, out].

    The tensor is [experts, out, in], or [experts, in, out] if `is_swapped`.
    """
    sides = (num_in, num_out) if is_swapped else (num_out, num_in)
    axes = ("experts", None, None)
    return TensorSpec((name,), ((num_experts, *sides),), transpose=not is_swapped, axes=axes)
