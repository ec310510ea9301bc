"""Weights of projections: matrices as they are loaded, or in blocks of columns for CPUs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.spec import Sections, projection
from specjax.device.weights.weight import Weight, weight

BLOCK_COLUMNS = 64  # columns of a block; 32 and 128 took longer on all CPUs that we tried
MIN_ROWS, MAX_ROWS = 8, 128  # smallest and largest limit on the rows in one product
MAX_COPIED = 2**26  # maximum bytes of rows that one product copies
Parts = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Matrix(Weight):
    """A matrix [in, out], which may merge several projections of one input.

    Each projection is a named part of the columns.
    """

    values: jax.Array
    parts: Parts = ()  # name and number of columns of each part
    axis: str | None = None  # see `Weight`

    @property
    def num_out(self) -> int:
        """The number of columns."""
        raise NotImplementedError

    def multiply(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """Return the product [..., out] of rows x [..., in], accumulated in `dtype` if given."""
        return self.total(self.multiply_part(x, dtype))

    def multiply_part(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """Return this device's result for rows x [..., in], from which `total` makes the product.

        The result is a partial sum if each device holds only some of the inputs.
        """
        raise NotImplementedError

    def multiply_from(self, x: jax.Array, first: int) -> jax.Array:
        """Return the product [N, out - first] of rows x [N, in] with columns from `first` on."""
        raise NotImplementedError

    def start(self, name: str) -> int:
        """Return the first column of the part called `name`."""
        names, sizes = zip(*self.parts, strict=True)
        return list(accumulate(sizes, initial=0))[names.index(name)]

    def split(self, y: jax.Array) -> dict[str, jax.Array]:
        """Return a dict from each part's name to the part's columns in a product y [N, out]."""
        bounds = accumulate((size for _, size in self.parts), initial=0)
        return {
            name: y[:, first : first + size]
            for first, (name, size) in zip(bounds, self.parts, strict=False)
        }


@weight
@dataclass(frozen=True)
class Dense(Matrix):
    """A matrix as one array [in, out]."""

    @property
    def num_out(self) -> int:
        """See `Matrix`."""
        return self.values.shape[1]

    @property
    def by_output(self) -> jax.Array:
        """The matrix, transposed to [out, in]."""
        return self.values.T

    def multiply_part(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """See `Matrix`."""
        return jnp.matmul(x, self.values, preferred_element_type=dtype)

    def multiply_from(self, x: jax.Array, first: int) -> jax.Array:
        """Return the product [N, out - first] of rows x [N, in] with columns from `first` on.

        On a GPU, only the columns from `first` on are read. On a CPU, the product with all columns
        is computed, because XLA would copy the columns from `first` on, which takes longer.
        """
        return jax.lax.platform_dependent(
            x,
            self.values,
            cpu=lambda x, values: jnp.matmul(x, values)[:, first:],
            default=lambda x, values: jnp.matmul(x, values[:, first:]),
        )

    def changes_on(self, platform: str, dtype: Any) -> bool:
        """See `Weight`."""
        has_blocks = self.values.shape[1] % BLOCK_COLUMNS == 0
        return platform == "cpu" and np.dtype(dtype) == np.float32 and has_blocks

    def on(self, platform: str) -> Matrix:
        """Return the matrix as `Blocks` if devices of `platform` then multiply faster.

        A matrix on several devices is returned unchanged. So is a matrix in host memory (a NumPy
        array), as in an engine that sleeps.
        """
        values = self.values
        if not isinstance(values, jax.Array) or len(values.sharding.device_set) > 1:
            return self
        if not self.changes_on(platform, values.dtype):
            return self
        blocks = np.asarray(values).reshape(len(values), -1, BLOCK_COLUMNS).swapaxes(0, 1)
        # Always a copy: JAX does not copy again, and a view would keep the whole matrix in memory.
        own = np.array(blocks, order="C")
        return Blocks(jax.device_put(own, values.sharding), self.parts)


@weight
@dataclass(frozen=True)
class Blocks(Matrix):
    """A matrix as blocks of columns [out / 64, in, 64], which are multiplied as a batch.

    On a CPU, two to eight rows take XLA nearly twice as long as one row if the matrix is one array
    [in, out]. With blocks, they take at most 1.5 times as long.
    """

    @property
    def num_out(self) -> int:
        """See `Matrix`."""
        return self.values.shape[0] * self.values.shape[2]

    def multiply_part(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """See `Matrix`."""
        y = self._multiply(x.reshape(-1, x.shape[-1]), self.values, dtype)
        return y.reshape(*x.shape[:-1], self.num_out)

    def multiply_from(self, x: jax.Array, first: int) -> jax.Array:
        """See `Matrix`."""
        if first % BLOCK_COLUMNS:
            return self.multiply(x)[:, first:]
        return self._multiply(x, self.values[first // BLOCK_COLUMNS :], None)

    def _multiply(self, x: jax.Array, blocks: jax.Array, dtype: Any) -> jax.Array:
        """Return the product of rows x [N, in] with `blocks`, computed for some rows at a time.

        XLA copies the rows for each block, so a product of all rows might take too much memory.
        """
        bytes_per_row = len(blocks) * x.shape[1] * x.dtype.itemsize
        most = min(MAX_ROWS, max(MIN_ROWS, MAX_COPIED // bytes_per_row))
        products = []
        for start in range(0, max(1, len(x)), most):
            rows = x[start : start + most]
            copied = jnp.broadcast_to(rows, (len(blocks), *rows.shape))
            y = jnp.matmul(copied, blocks, preferred_element_type=dtype).transpose(1, 0, 2)
            products.append(y.reshape(len(rows), len(blocks) * BLOCK_COLUMNS))
        return jnp.concatenate(products) if len(products) > 1 else products[0]


def dense(
    names: Sequence[str],
    num_in: int,
    num_outs: Sequence[int],
    *,
    parts: Mapping[str, int] | Iterable[str] = (),
    interleaved: Mapping[str, tuple[int, ...]] | None = None,
    rows: str | None = None,
    columns: str | Sections | None = None,
) -> Any:
    """Return a `Dense` that merges projections [out, in] of one input.

    The result has a `TensorSpec` instead of an array.

    Args:
        names: the names of the tensors, which hold one projection each.
        num_in: the width of the input.
        num_outs: the width of each tensor's output.
        parts: the names of the matrix's parts, or a mapping from name to number of columns. Use a
            mapping if a part is not exactly one tensor.
        interleaved: see `projection`, which also explains `rows` and `columns`.
    """
    sizes = parts if isinstance(parts, Mapping) else dict(zip(parts, num_outs, strict=False))
    return Dense(
        projection(names, num_in, num_outs, interleaved, rows=rows, columns=columns),
        tuple(sizes.items()),
    )
