"""Rows that go on from what the caches hold: the context of every serving step."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int32

from specjax.device.cache.kind import CacheKind


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachedRows:
    """T rows for each of B requests, laid end to end; row b*T + t belongs to request b.

    Rejected tokens need no undoing. Their keys and values lie past a request's length, where no row
    looks and where the next extension writes. A recurrent state lags behind by the `pending` tokens
    that the last extension ran and that were accepted: this one folds them in first. Rows that
    `folds` marks as certain, as a prompt's are, leave nothing pending. Rows that are in the pages
    already run again without `writes`: pages are shared, and another program may round differently.
    """

    positions: Int32[jax.Array, "N"]  # absolute; -1 for a padding row
    page_table: Int32[jax.Array, "B P"]  # -1 where no page is assigned
    slots: Int32[jax.Array, "B"] | None = None  # of recurrent states; past the last for padding
    pending: Int32[jax.Array, "B"] | None = None
    folds: bool = field(default=False, metadata={"static": True})
    writes: bool = field(default=True, metadata={"static": True})
    kernels: str = field(default="auto", metadata={"static": True})

    @classmethod
    def starting_at(
        cls, starts: jax.Array, counts: jax.Array, num_rows: int, page_table: jax.Array, **others
    ) -> "CachedRows":
        """`num_rows` rows per request from position starts[b] on, of which counts[b] are real."""
        row = jnp.arange(num_rows, dtype=jnp.int32)[None]
        positions = jnp.where(row < counts[:, None], starts[:, None] + row, -1)
        return cls(positions.reshape(-1), page_table, **others)

    @property
    def width(self) -> int:
        """T, rows per request."""
        return self.positions.shape[0] // self.page_table.shape[0]

    def by_request(self, x: jax.Array) -> jax.Array:
        """[N, ...] as [B, T, ...]."""
        return x.reshape(self.page_table.shape[0], -1, *x.shape[1:])

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: Any
    ) -> tuple[jax.Array, Any]:
        """See `Rows.mix`."""
        return kind.cached(self, cache, layer, inputs)


def padded_width(batch: int, width: int, multiple: int) -> int:
    """The least T >= width with batch * T a multiple of `multiple`, as matrix units want it."""
    while batch * width % multiple:
        width += 1
    return width
