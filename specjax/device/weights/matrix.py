"""Weights of projections: unquantised matrices, and copies in blocks of columns for CPUs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.spec import Sections, projection
from specjax.device.instructions import cpu_instructions, cpu_vendor
from specjax.device.weights.weight import Weight, weight

FEW_ROWS = 8  # maximum number of rows that are multiplied by blocks
Parts = tuple[tuple[str, int], ...]


def block_columns() -> int | None:
    """Return the number of columns of a block; None if this CPU multiplies faster without blocks.

    XLA's products of few rows read 16 columns at a time, or 64 with AVX-512. Blocks of 16 or 64
    columns were faster on AMD's CPUs with and without AVX-512, and slower on Intel's with AVX-512.
    """
    if cpu_instructions() != "AVX-512":
        return 16
    return None if cpu_vendor() == "GenuineIntel" else 64


@dataclass(frozen=True)
class Matrix(Weight):
    """A matrix [in, out], which can merge several projections of one input.

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
        if platform != "cpu" or np.dtype(dtype) != np.float32:
            return False
        columns = block_columns()
        return columns is not None and self.values.shape[1] % columns == 0

    def on(self, platform: str) -> Matrix:
        """Return the matrix as `Blocks` if devices of `platform` then multiply few rows faster.

        A matrix on several devices is returned unchanged. So is a matrix in host memory (a NumPy
        array), as in an engine that sleeps.
        """
        values = self.values
        if not isinstance(values, jax.Array) or len(values.sharding.device_set) > 1:
            return self
        columns = block_columns()
        if columns is None or not self.changes_on(platform, values.dtype):
            return self
        blocks = np.asarray(values).reshape(len(values), -1, columns).swapaxes(0, 1)
        own = jax.device_put(np.array(blocks, order="C"), values.sharding)
        return Blocks(values, self.parts, self.axis, column_blocks=own)


@weight
@dataclass(frozen=True)
class Blocks(Dense):
    """A matrix [in, out], and its copy as blocks of columns [out / C, in, C].

    XLA multiplies few rows by C columns at a time (see `block_columns`). A block stores the numbers
    of C columns contiguously; in the array [in, out], these numbers are far apart. More than
    `FEW_ROWS` rows are multiplied by the array [in, out], because jax 0.10.2 multiplies a batch of
    blocks on one core.
    """

    column_blocks: jax.Array = field(kw_only=True)

    def multiply_part(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """See `Matrix`."""
        if math.prod(x.shape[:-1]) > FEW_ROWS:
            return super().multiply_part(x, dtype)
        y = _multiply_blocks(x.reshape(-1, x.shape[-1]), self.column_blocks, dtype)
        return y.reshape(*x.shape[:-1], self.num_out)

    def multiply_from(self, x: jax.Array, first: int) -> jax.Array:
        """See `Matrix`."""
        columns = self.column_blocks.shape[2]
        if len(x) > FEW_ROWS or first % columns:
            return self.multiply(x)[:, first:]
        return _multiply_blocks(x, self.column_blocks[first // columns :], None)


def _multiply_blocks(x: jax.Array, blocks: jax.Array, dtype: Any) -> jax.Array:
    """Return the product [N, B C] of rows x [N, in] with `blocks` [B, in, C]."""
    copied = jnp.broadcast_to(x, (len(blocks), *x.shape))
    y = jnp.matmul(copied, blocks, preferred_element_type=dtype)
    return y.transpose(1, 0, 2).reshape(len(x), len(blocks) * blocks.shape[2])


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
