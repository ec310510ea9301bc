"""Specs that build engine arrays from a checkpoint's tensors, and convert the arrays back.

A model describes its parameters as a pytree with a `TensorSpec` in the place of each array.
Loading, exporting, initialising and checking each walk that tree once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Sections = tuple[tuple[str | None, int], ...]  # (name, number of rows) of each section


@dataclass(frozen=True)
class TensorSpec:
    """Describes how an engine array is built from tensors of a file.

    The tensors are concatenated along their first axis, because the engine merges projections with
    the same input. Then the last two axes may be swapped, because checkpoints store projections as
    [out, in], and the engine uses [in, out].

    Attributes:
        names: the names of the file tensors.
        file_shapes: the shapes of the file tensors.
        transpose: whether to swap the last two axes.
        interleaved: for each file tensor, the sizes of a head's parts, in rows; () for a tensor
            whose rows keep their order. In the file, all parts of head 0 precede all parts of head
            1, and so on. In the engine's array, the first parts of all heads precede the second
            parts of all heads, and so on. `interleaved` is () if all tensors keep their order.
        num_stacked: the number of equal groups of tensors, such as experts, that are stacked along
            a new leading axis; 0 without such an axis.
        is_squeezed: whether to drop the second axis, which has size one.
        dtype: the fixed dtype of the array; None for the model's dtype.
        fill: the initial value for training; None for the defaults of `init_params`.
        is_buffer: whether the tensor is a buffer in torch and not a parameter. Trainers can leave a
            buffer out of a weight update. The buffer then keeps its value.
        cuts: for each file tensor, the alternative ways to divide it over devices (see `division`).
            A way is a pair of an axis and its sections. A section is a pair of a name, such as
            "heads", and a number of rows. The name is None for rows that all devices have.
            `divide` uses the first way with a name in its `shares`. `cuts` is () for an array that
            is never divided.
        stacked_as: the key of `shares`, such as "experts", that says how devices divide the stacked
            groups; None if every device has all groups.
        divides_input: whether `cuts` divide the axis of a matrix's inputs, so that the products of
            all devices must be added up.
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
    cuts: tuple[tuple[tuple[int, Sections], ...], ...] = ()
    stacked_as: str | None = None
    divides_input: bool = False

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
        """Return the file tensors in the order of `names`. `find(name)` returns a `Readable`."""
        return [find(name).read() for name in self.names]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part of the array that one device has."""
        return self.shape

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """Return the engine array in `dtype`, from the file tensors in the order of `names`.

        The result is a NumPy array if the tensors are NumPy arrays; otherwise, a JAX array.
        """
        xp = module_of(parts[0])
        # Cast each part, since a file may contain several dtypes.
        cast = (part.astype(self.dtype or dtype) for part in parts)
        pairs = zip(cast, self.file_shapes, self._interleaved, strict=True)
        rows = [
            _regroup(part.reshape(shape[0], *self._row_shape), sizes)
            for part, shape, sizes in pairs
        ]
        per_run = len(rows) // max(1, self.num_stacked)
        runs = [xp.concatenate(rows[i : i + per_run]) for i in range(0, len(rows), per_run)]
        array = xp.stack(runs) if self.num_stacked else runs[0]
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

    def split(self, array: Any) -> dict[str, Any]:
        """Return the file tensors, by name, from which `join` would build `array`.

        The results are NumPy arrays if `array` is one; otherwise, JAX arrays.
        """
        parts = zip(
            self.names, self.file_shapes, self._interleaved, self._places(array), strict=True
        )
        return {
            name: _interleave(place, sizes).reshape(shape) for name, shape, sizes, place in parts
        }

    @property
    def _row_shape(self) -> tuple[int, ...]:
        inner = self.file_shapes[0][1:]
        return inner[1:] if self.is_squeezed else inner

    @property
    def _interleaved(self) -> tuple[tuple[int, ...], ...]:
        return self.interleaved or ((),) * len(self.names)

    def _places(self, array: Any) -> list[Any]:
        """Return the parts of `array` that come from each file tensor, in the order of `names`."""
        rows = array.swapaxes(-1, -2) if self.transpose else array
        runs = list(rows) if self.num_stacked else [rows]
        per_run = len(self.names) // len(runs)
        ends = accumulate((shape[0] for shape in self.file_shapes[:per_run]), initial=0)
        bounds = list(pairwise(ends))
        return [run[start:end] for run in runs for start, end in bounds]


def module_of(array: Any) -> Any:
    """Return the module with the functions for an array: NumPy or `jax.numpy`."""
    return jnp if isinstance(array, jax.Array) else np


def _regroup(x: Any, sizes: tuple[int, ...]) -> Any:
    """Reorder the rows of a file tensor to the engine's order; see `TensorSpec.interleaved`."""
    if not sizes:
        return x
    xp = module_of(x)
    groups = x.reshape(-1, sum(sizes), *x.shape[1:])
    parts = xp.split(groups, np.cumsum(sizes)[:-1], axis=1)
    return xp.concatenate([part.reshape(-1, *x.shape[1:]) for part in parts])


def _interleave(x: Any, sizes: tuple[int, ...]) -> Any:
    """Reorder rows from the engine's order to the file's order. Inverse of `_regroup`."""
    if not sizes:
        return x
    xp = module_of(x)
    num_groups = len(x) // sum(sizes)
    parts = xp.split(x, np.cumsum(sizes)[:-1] * num_groups)
    groups = [part.reshape(num_groups, -1, *x.shape[1:]) for part in parts]
    return xp.concatenate(groups, axis=1).reshape(x.shape)


# These functions return Any, because specs replace arrays in a tree of parameters.
def projection(
    names: Sequence[str],
    num_in: int,
    num_outs: Sequence[int],
    interleaved: Mapping[str, tuple[int, ...]] | None = None,
    *,
    rows: str | None = None,
    columns: str | Sections | None = None,
) -> Any:
    """Return a `TensorSpec` that merges projections [out, in] into an array [in, sum of outs].

    All projections have the same input.

    Args:
        names: the names of the file tensors.
        num_in: the size of the input.
        num_outs: the size of each projection's output.
        interleaved: for tensors whose rows must be reordered, the sizes of a head's parts by tensor
            name (see `TensorSpec.interleaved`).
        rows: the name of the input axis, if it may be divided over devices.
        columns: the `sections` of the merged outputs (see `cut_rows`), if they may be divided.
    """
    sizes = tuple((interleaved or {}).get(name, ()) for name in names)
    shapes = tuple((n, num_in) for n in num_outs)
    return TensorSpec(
        tuple(names),
        shapes,
        transpose=True,
        interleaved=sizes if any(sizes) else (),
        cuts=cut_rows(shapes, rows, 1) if rows else cut_rows(shapes, columns),
        divides_input=rows is not None,
    )


def cut_rows(
    shapes: Sequence[tuple[int, ...]],
    sections: str | Sections | None,
    axis: int = 0,
    *,
    groups: str | None = None,
) -> tuple[tuple[tuple[int, Sections], ...], ...]:
    """Return the field `TensorSpec.cuts` of tensors that devices divide along one axis.

    Args:
        shapes: the shapes of the file tensors.
        sections: pairs (name, number of rows) that make up the axis of the first tensor, then of
            the second tensor, and so on (see `TensorSpec.cuts`). A single name if the whole axis of
            each tensor is a section with this name. None if the tensors are never divided.
        axis: the axis that is divided.
        groups: the name of the tensors' first axis; None if this axis is never divided. If
            `divide` has a share with this name, the first axis is divided instead of `axis`.
    """
    if sections is None:
        return ()
    left = list(sections) if not isinstance(sections, str) else []
    cuts = []
    for shape in shapes:
        own, size = [], 0
        while size < shape[axis]:
            own.append(left.pop(0) if left else (sections, shape[axis]))
            size += own[-1][1]
        by_group = [] if groups is None else [(0, ((groups, shape[0]),))]
        cuts.append((*by_group, (axis, tuple(own))))
    return tuple(cuts)


def stored(
    names: Sequence[str],
    *shapes: tuple[int, ...],
    fill: float | None = None,
    rows: str | Sections | None = None,
) -> Any:
    """Return a `TensorSpec` that only concatenates tensors (norms, biases, embeddings).

    If the first axis may be divided over devices, `rows` has its sections; see `cut_rows`.
    """
    return TensorSpec(tuple(names), shapes, fill=fill, cuts=cut_rows(shapes, rows))


def depthwise(name: str, channels: int, taps: int, sections: str | Sections | None = None) -> Any:
    """Return the `TensorSpec` of depthwise convolution weights [taps, channels].

    The file tensor is [channels, 1, taps]. `sections` divides the channels (see `cut_rows`).
    """
    shapes = ((channels, 1, taps),)
    cuts = cut_rows(shapes, sections)
    return TensorSpec((name,), shapes, transpose=True, is_squeezed=True, cuts=cuts)


def experts(
    names: Sequence[Sequence[str]],
    num_in: int,
    num_outs: Sequence[int],
    *,
    rows: str | None = None,
    columns: str | None = None,
) -> Any:
    """Return the `TensorSpec` of an array [experts, in, sum of outs].

    The array has one matrix per expert, which merges the expert's projections. `projection`
    explains `rows` and `columns`. If `divide` has a share named "experts", devices take whole
    experts instead.
    """
    shapes = tuple((n, num_in) for _ in names for n in num_outs)
    return TensorSpec(
        tuple(name for one in names for name in one),
        shapes,
        transpose=True,
        num_stacked=len(names),
        cuts=cut_rows(shapes, rows, 1) if rows else cut_rows(shapes, columns),
        divides_input=rows is not None,
        stacked_as="experts",
    )


def fused_experts(
    name: str,
    num_experts: int,
    num_in: int,
    num_out: int,
    is_swapped: bool = False,
    *,
    rows: str | None = None,
    columns: str | Sections | None = None,
) -> Any:
    """Return the `TensorSpec` of an array [experts, in, out], stored in one tensor.

    The tensor is [experts, out, in], or [experts, in, out] if `is_swapped`. `projection` explains
    `rows` and `columns`. If `divide` has a share named "experts", devices take whole experts
    instead.
    """
    shape = (num_experts, *((num_in, num_out) if is_swapped else (num_out, num_in)))
    in_axis, out_axis = (1, 2) if is_swapped else (2, 1)
    axis = in_axis if rows else out_axis
    cuts = cut_rows([shape], rows or columns, axis, groups="experts")
    return TensorSpec(
        (name,), (shape,), transpose=not is_swapped, cuts=cuts, divides_input=rows is not None
    )
