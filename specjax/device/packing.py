"""Packs the inputs of a program in one array, which takes one transfer to the device.

A row of the array holds the fields of one request as consecutive 32-bit words. A class of inputs
declares its fields with `packed`. The host fills a packed array through views of its fields, and
the device slices the array.
"""

from collections.abc import Callable
from dataclasses import field, fields
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import numpy as np

Inputs = TypeVar("Inputs")


def packed(padding: int | str | Callable[[Any], Any], width: str | None = None) -> Any:
    """Declare a field of an inputs dataclass: integers i32[B], or i32[B, width].

    Args:
        padding: the value in a padding row, or the name of the `Layout` attribute with this value.
            If the field is a tree of arrays, a function that takes the layout and returns one
            padding row: a tree of NumPy arrays [1] or [1, width] of 32-bit numbers.
        width: the name of the `Layout` attribute with the width; None for a field i32[B].
    """

    def row(layout: Any) -> Any:
        if callable(padding):
            return padding(layout)
        value = getattr(layout, padding) if isinstance(padding, str) else padding
        return np.full((1,) if width is None else (1, getattr(layout, width)), value, np.int32)

    return field(metadata={"row": row})


class Packing(Generic[Inputs]):
    """The packing of one class of inputs.

    A packed array i32[B, words] holds the leaves of the inputs in order.
    """

    def __init__(self, kind: type[Inputs], layout: Any):
        declared: Any = fields(kind)  # pyright: ignore[reportArgumentType]
        rows = [one.metadata["row"](layout) for one in declared]
        self._leaves, tree = jax.tree.flatten(kind(*rows))
        ends = np.cumsum([0, *(leaf.size for leaf in self._leaves)]).tolist()
        self._slices = list(map(slice, ends, ends[1:]))
        self._places = [
            ((slice(None), words.start if leaf.ndim == 1 else words), leaf.dtype)
            for leaf, words in zip(self._leaves, self._slices, strict=True)
        ]
        is_number = [isinstance(row, np.ndarray) and row.ndim == 1 for row in rows]
        self._num_numbers = [*is_number, False].index(False)  # leading scalar fields
        # Every step makes an instance, so avoid `tree.unflatten` if all fields are arrays or None.
        absent = {one.name: None for one, row in zip(declared, rows, strict=True) if row is None}
        is_flat = len(self._leaves) + len(absent) == len(rows)
        self._make: Any = partial(kind, **absent) if is_flat else lambda *x: tree.unflatten(x)
        self._padding = np.concatenate([leaf.reshape(-1).view(np.int32) for leaf in self._leaves])
        self._empty: dict[int, np.ndarray] = {}  # arrays of padding rows, by number of rows

    def shape(self, batch: int) -> tuple[int, int]:
        """Return the shape of a packed array for `batch` requests."""
        return batch, len(self._padding)

    def rows(self, batch: int) -> tuple[np.ndarray, Inputs]:
        """Return a new packed array of `batch` padding rows, and writable views of its fields."""
        if batch not in self._empty:
            self._empty[batch] = np.repeat(self._padding[None], batch, axis=0)
        array = self._empty[batch].copy()
        return array, self.views(array)

    def views(self, array: np.ndarray) -> Inputs:
        """Return views of the fields of a packed NumPy array, on the host."""
        views = []
        for place, dtype in self._places:
            view = array[place]
            views.append(view if dtype == np.int32 else view.view(dtype))
        return self._make(*views)

    def unpack(self, array: jax.Array) -> Inputs:
        """Return the fields of a packed JAX array, inside a compiled program."""
        count = self._num_numbers
        # One transposition is cheaper than a slice per scalar field.
        values = list(array[:, :count].T) if count > 1 else []
        rest = slice(len(values), None)
        for leaf, words in zip(self._leaves[rest], self._slices[rest], strict=True):
            values.append(array[:, words].reshape(-1, *leaf.shape[1:]).view(leaf.dtype))
        return self._make(*values)
