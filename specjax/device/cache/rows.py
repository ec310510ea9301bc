"""Rows of serving steps. A row is one token of a request whose earlier tokens are cached."""

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

    Rejected tokens need no rollback. Their keys and values are past the request's length: no row
    reads them, and later rows at these positions overwrite them.

    A recurrent state lacks the last `pending` accepted tokens. Before the rows run, the state is
    updated with these tokens. If `folds` is true, the rows belong to a prompt and cannot be
    rejected. The state is then updated with the rows, too, so that no tokens are pending
    afterwards.

    If `writes` is false, the rows' keys and values are already in the pages and are not written
    again. Other requests can share these pages, so the stored keys and values must not change. This
    program can round differently from the program that wrote the pages. If `attends` is false, only
    keys and values are computed.

    `windows` are the attention windows of layers that have separate pages. A page that is behind
    the window of every row is freed, and its entry in these layers' page table becomes -1.
    """

    positions: Int32[jax.Array, "N"]  # absolute; -1 for a padding row
    page_table: Int32[jax.Array, "B P"]  # -1 where no page is assigned
    slots: Int32[jax.Array, "B"] | None = None  # slots of states; out of range for padding
    pending: Int32[jax.Array, "B"] | None = None  # numbers of pending tokens; None without states
    # The last position that a row attends to; None: the row's position.
    reach: Int32[jax.Array, "N"] | None = None
    # The last position of a row's window; None: `reach`.
    origin: Int32[jax.Array, "N"] | None = None
    folds: bool = field(default=False, metadata={"static": True})
    window_tables: tuple[Int32[jax.Array, "B P"], ...] = ()  # one per window
    windows: tuple[int, ...] = field(default=(), metadata={"static": True})
    writes: bool = field(default=True, metadata={"static": True})
    attends: bool = field(default=True, metadata={"static": True})
    kernels: str = field(default="auto", metadata={"static": True})

    @classmethod
    def starting_at(
        cls, starts: jax.Array, counts: jax.Array, num_rows: int, page_table: jax.Array, **others
    ) -> "CachedRows":
        """Create `num_rows` rows per request.

        Request b has `counts[b]` real rows from position `starts[b]` on, then padding rows.
        `others` are other fields of the class.
        """
        row = jnp.arange(num_rows, dtype=jnp.int32)[None]
        positions = jnp.where(row < counts[:, None], starts[:, None] + row, -1)
        return cls(positions.reshape(-1), page_table, **others)

    @property
    def width(self) -> int:
        """T, the number of rows per request."""
        return self.positions.shape[0] // self.page_table.shape[0]

    def by_request(self, x: jax.Array) -> jax.Array:
        """Reshape x [N, ...] to [B, T, ...]."""
        return x.reshape(self.page_table.shape[0], -1, *x.shape[1:])

    def table(self, window: int | None) -> jax.Array:
        """Return the page table i32[B, P] of layers with this `window`."""
        if window in self.windows:
            return self.window_tables[self.windows.index(window)]
        return self.page_table

    def without_windows(self) -> "CachedRows":
        """Return the rows without separate page tables for windows."""
        return replace(self, window_tables=(), windows=())

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: Any
    ) -> tuple[jax.Array, Any]:
        """See `Rows.mix`."""
        queries, cache = kind.write(self, cache, layer, inputs)
        return kind.read(self, cache, layer, inputs, queries), cache


class RowInputs(Protocol):
    """The inputs of a cache kind: N projected rows, and weights that all rows share."""

    def of_rows(self, part: slice) -> Any:
        """Return the inputs with only the projected rows in the range `part`."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class JoinedRows:
    """The rows (tokens) of several parts of a step, concatenated for one forward pass.

    The parts are, for example, prefill chunks and a round. Attention and recurrent layers, which
    use the cache, run once per part. All other layers run once. A part must not read tokens that
    another part writes.
    """

    parts: tuple[CachedRows, ...]

    @property
    def positions(self) -> jax.Array:
        """The positions of all rows, i32[N]."""
        return jnp.concatenate([rows.positions for rows in self.parts])

    @property
    def kernels(self) -> str:
        """See `CachedRows.kernels`."""
        return self.parts[0].kernels

    @property
    def attends(self) -> bool:
        """Whether any of the concatenated parts of the step uses the output of attention."""
        return any(rows.attends for rows in self.parts)

    @property
    def slices(self) -> tuple[slice, ...]:
        """For each of the joined `parts`, the slice with its rows."""
        ends = list(accumulate((len(rows.positions) for rows in self.parts), initial=0))
        return tuple(map(slice, ends, ends[1:]))

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: RowInputs
    ) -> tuple[jax.Array, Any]:
        """See `Rows.mix`.

        All parts write before any part reads. On a CPU, XLA does not order reads before writes. It
        would copy the cache if a part wrote after another part had read.
        """
        own = [inputs.of_rows(part) for part in self.slices]
        queries = []
        for rows, part in zip(self.parts, own, strict=True):
            made, cache = kind.write(rows, cache, layer, part)
            queries.append(made)
        each = zip(self.parts, own, queries, strict=True)
        outputs = [kind.read(rows, cache, layer, part, made) for rows, part, made in each]
        return jnp.concatenate(outputs), cache


def padded_width(batch: int, width: int, multiple: int) -> int:
    """Return the smallest T >= width such that batch * T is a multiple of `multiple`."""
    while batch * width % multiple:
        width += 1
    return width
