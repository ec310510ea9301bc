"""Weights of embeddings as quantised numbers, as some checkpoints store them."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from specjax.device.weights.matrix import Dense
from specjax.device.weights.table import Table
from specjax.device.weights.weight import weight


@weight
@dataclass(frozen=True)
class StoredTable(Table):
    """An embedding table whose rows are the outputs of a quantised matrix [D, V].

    Only the rows that are looked up are dequantised. A tied output head multiplies by the matrix.
    """

    values: Any  # a `Quantised` matrix
    row_dtype: str = field(kw_only=True)  # dtype of dequantised rows

    @property
    def dtype(self) -> Any:
        """See `Table`."""
        return self.row_dtype

    @property
    def num_rows(self) -> int:
        """See `Table`."""
        return self.values.num_out

    @property
    def by_output(self) -> jax.Array:
        """See `Table`."""
        return self.values.plain(self.row_dtype).by_output

    def multiply(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """See `Table`."""
        return self.values.multiply(x, dtype)

    def plain(self, dtype: Any) -> Table:
        """See `Weight`."""
        return Table(self.values.plain(dtype).by_output, self.axis)

    @property
    def numbers(self) -> tuple[str, ...]:
        """See `Weight`."""
        return self.values.numbers

    def quantise(self, plain: Table) -> "StoredTable":
        """See `Weight`."""
        return replace(self, values=self.values.quantise(Dense(plain.values.T)))

    def with_kernels(self, kernels: str) -> "StoredTable":
        """See `Weight`."""
        return replace(self, values=self.values.with_kernels(kernels))

    def _at(self, places: jax.Array) -> jax.Array:
        return self.values.outputs(places).plain(self.row_dtype).by_output
