"""The slots of a simulated device, and the pools of its caches.

A cell of a pool holds a digest of tokens in place of keys and values. A request's cells are read
through its page tables, and compared with the digests of its tokens.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.scripts import EMPTY, fold

from specjax.config import EngineConfig


@dataclass
class Slot:
    """The state of the request in a slot."""

    number: int
    tokens: list[int] = field(default_factory=list)
    digests: Any = None  # i64[...], of the first n tokens
    seed: int = 0
    prompt_length: int = 0
    limit: int = 0
    min_tokens: int = 0
    processor: int = -1  # number of its logits processors
    stop_ids: frozenset[int] = frozenset()
    length: int | None = None  # None before the first chunk
    observed: int = 0  # tokens that the drafter has observed
    is_active: bool = False
    # Of recurrent models:
    state: int = EMPTY  # the digest of the tokens that have been folded in
    ring: list[int] = field(default_factory=list)  # tokens of the last round
    pending: int = 0  # number of accepted tokens in `ring` that are not folded in yet

    def append(self, token: int) -> None:
        """Append a token, and the digest of all tokens so far."""
        self.tokens.append(token)
        self.digests[len(self.tokens)] = fold(int(self.digests[len(self.tokens) - 1]), [token])


@dataclass(frozen=True)
class Row:
    """A row of a round, between two programs of the round."""

    slot: Slot
    start: int
    tables: np.ndarray  # the main page table, and one for each window
    num_drafts: int
    tokens: list[int]  # accepted drafts, and the token after them
    drafts: list[int]


class Pools:
    """The pools of the target, of each window of its layers, and of the drafter."""

    def __init__(
        self,
        config: EngineConfig,
        windows: dict[int, int],
        rng: np.random.Generator,
        tally: Counter,
    ):
        """`windows` maps the size of a window to its number of pages. Pools begin with garbage."""
        self._config, self._rng, self._tally = config, rng, tally
        self.target, self.drafter, *others = (
            self.garbage(pages * config.page_size)
            for pages in (config.num_pages, config.num_pages, *windows.values())
        )
        self.windows = dict(zip(windows, others, strict=True))

    def garbage(self, count: int) -> np.ndarray:
        """Return `count` random digests."""
        return self._rng.integers(-(2**62), 2**62, count)

    def cells(self, table: np.ndarray, start: int, end: int) -> np.ndarray:
        """Return the cells of positions start to end - 1; -1 for a position without a page."""
        size = self._config.page_size
        first, stop = start // size, -(-end // size)
        pages = np.full(stop - first, -1)
        known = table[first:stop]
        pages[: len(known)] = known
        assert (pages < self._config.num_pages).all(), f"no such page in {table}"
        cells = np.where(pages[:, None] >= 0, pages[:, None] * size + np.arange(size), -1)
        return cells.ravel()[start - first * size : end - first * size]

    def check_reads(
        self, slot: Slot, start: int, tables: np.ndarray, *, may_be_behind: bool = False
    ) -> None:
        """Check that all cells before `start` hold the digests of the slot's tokens.

        If `may_be_behind`, the drafter's cells are not checked.
        """
        if not start:
            return
        table, *others = tables
        read = [("target", self.target, table, 1, 0)]
        if not may_be_behind:
            assert slot.length is None or slot.observed == start, "the drafter is behind"
            read.append(("drafter", self.drafter, table, 2, 0))
        for (window, pool), own in zip(self.windows.items(), others, strict=True):
            # The row at `start` is the first of its window's tokens to be read as others are.
            read.append((f"window {window}", pool, own, 1, max(0, start - window + 1)))
        for name, pool, own, ahead, first in read:
            cells = self.cells(own, first, start)
            held = np.where(cells >= 0, pool[cells], 0)
            is_wrong = held != slot.digests[first + ahead : start + ahead]
            assert not is_wrong.any(), (
                f"position {first + int(is_wrong.argmax())} of {start}, {name}: not what was left "
                f"there, {int(is_wrong.sum())} wrong, pages {own}"
            )
            self._tally["cells read"] += len(cells)

    def write_target(
        self, tables: np.ndarray, start: int, values: np.ndarray, num_needed: int
    ) -> None:
        """Write digests to the target's pools from position `start` on.

        The first `num_needed` positions must have pages.
        """
        for table, pool in zip(tables, (self.target, *self.windows.values()), strict=True):
            cells = self.cells(table, start, start + len(values))
            assert cells[:num_needed].min() >= 0, f"no page for what is written from {start} on"
            write(pool, cells, values)


def write(pool: np.ndarray, cells: np.ndarray, values: np.ndarray) -> None:
    """Write values to the cells that exist."""
    is_mapped = cells >= 0
    pool[cells[is_mapped]] = values[is_mapped]
