"""Rows that continue the cached sequences: the context of every serving step."""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Int32

from specjax.device.cache.kind import CacheKind


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachedRows:
    """T rows for each of B requests, concatenated; row b*T + t belongs to request b.

    Rejected tokens need no rollback. Their keys and values are past the request's length, where no
    row reads and the next extension overwrites them. A recurrent state lags behind by the `pending`
    accepted tokens of the last extension; this one folds them in first. With `folds`, rows cannot
    be rejected (a prompt), so they leave nothing pending. Rows that are already in the pages run
    again without `writes`: pages are shared, and another program may round differently. Those that
    are there for their keys and values alone do not have to attend.

    Layers with one of the `windows` have pages of their own, in a table that has -1 also for pages
    that were given back: they are behind the window of every row.
    """

    positions: Int32[jax.Array, "N"]  # absolute; -1 for a padding row
    page_table: Int32[jax.Array, "B P"]  # -1 where no page is assigned
    slots: Int32[jax.Array, "B"] | None = None  # of recurrent states; out of range for padding
    pending: Int32[jax.Array, "B"] | None = None
    reach: Int32[jax.Array, "N"] | None = None  # what a row attends up to, if not itself
    origin: Int32[jax.Array, "N"] | None = None  # what windows count back from, if not that
    folds: bool = field(default=False, metadata={"static": True})
    window_tables: tuple[Int32[jax.Array, "B P"], ...] = ()  # of each of `windows`
    windows: tuple[int, ...] = field(default=(), metadata={"static": True})
    writes: bool = field(default=True, metadata={"static": True})
    attends: bool = field(default=True, metadata={"static": True})
    kernels: str = field(default="auto", metadata={"static": True})

    @classmethod
    def starting_at(
        cls, starts: jax.Array, counts: jax.Array, num_rows: int, page_table: jax.Array, **others
    ) -> "CachedRows":
        """Create `num_rows` rows per request from position starts[b], counts[b] of them real."""
        row = jnp.arange(num_rows, dtype=jnp.int32)[None]
        positions = jnp.where(row < counts[:, None], starts[:, None] + row, -1)
        return cls(positions.reshape(-1), page_table, **others)

    @property
    def width(self) -> int:
        """T, the number of rows per request."""
        return self.positions.shape[0] // self.page_table.shape[0]

    def by_request(self, x: jax.Array) -> jax.Array:
        """Reshape [N, ...] to [B, T, ...]."""
        return x.reshape(self.page_table.shape[0], -1, *x.shape[1:])

    def table(self, window: int | None) -> jax.Array:
        """Return the page table i32[B, P] of layers with this window."""
        if window in self.windows:
            return self.window_tables[self.windows.index(window)]
        return self.page_table

    def without_windows(self) -> "CachedRows":
        """Return the rows for layers that have no pages of their own, whatever their windows."""
        return replace(self, window_tables=(), windows=())

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: Any
    ) -> tuple[jax.Array, Any]:
        """See `Rows.mix`."""
        return kind.cached(self, cache, layer, inputs)


class RowInputs(Protocol):
    """Projections of N rows as a kind of cache expects them, with weights that all rows share."""

    def of_rows(self, part: slice) -> Any:
        """Return those of some rows."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class JoinedRows:
    """Rows of several kinds, one after the other, that are apart only where they use the cache.

    No part may read what another writes.
    """

    parts: tuple[CachedRows, ...]

    @property
    def positions(self) -> jax.Array:
        """Those of all rows, i32[N]."""
        return jnp.concatenate([rows.positions for rows in self.parts])

    @property
    def kernels(self) -> str:
        """See `CachedRows.kernels`."""
        return self.parts[0].kernels

    @property
    def attends(self) -> bool:
        """Whether any of them does."""
        return any(rows.attends for rows in self.parts)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where each part's rows are."""
        ends = list(accumulate((len(rows.positions) for rows in self.parts), initial=0))
        return tuple(map(slice, ends, ends[1:]))

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: RowInputs
    ) -> tuple[jax.Array, Any]:
        """See `Rows.mix`."""
        outputs = []
        for rows, part in zip(self.parts, self.slices, strict=True):
            out, cache = rows.mix(kind, cache, layer, inputs.of_rows(part))
            outputs.append(out)
        return jnp.concatenate(outputs), cache


def padded_width(batch: int, width: int, multiple: int) -> int:
    """Return the smallest T >= width with batch * T a multiple of `multiple`, for matrix units."""
    while batch * width % multiple:
        width += 1
    return width
