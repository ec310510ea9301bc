"""The pools of a simulated device: cells that hold digests, found by page tables and checked."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from support.simulated_slots import Slot

from specjax.config import EngineConfig
from specjax.device.layout import Layout


class SimulatedMemory:
    """What a device reads and writes."""

    config: EngineConfig
    layout: Layout
    tally: Counter
    target: np.ndarray
    drafter: np.ndarray
    windows: Mapping[int, np.ndarray]
    _rng: np.random.Generator

    def _garbage(self, count: int) -> np.ndarray:
        return self._rng.integers(-(2**62), 2**62, count)

    def _tables(self, table: np.ndarray) -> np.ndarray:
        """The page tables of a row."""
        return table.reshape(self.layout.num_tables, -1)

    def _cells(self, table: np.ndarray, start: int, end: int) -> np.ndarray:
        """The cells of positions [start, end); -1 where no page is assigned."""
        size = self.config.page_size
        positions = np.arange(start, end)
        places = positions // size
        pages = np.where(places < len(table), table[np.minimum(places, len(table) - 1)], -1)
        assert (pages < self.config.num_pages).all(), f"no such page in {table}"
        return np.where(pages >= 0, pages * size + positions % size, -1)

    def _check_reads(
        self, slot: Slot, start: int, tables: np.ndarray, *, may_be_behind: bool = False
    ) -> None:
        if not start:
            return
        table, *others = tables
        pools = [("target", self.target, table, 1, 0)]
        if not may_be_behind:
            assert slot.length is None or slot.observed == start, "the drafter is behind"
            pools.append(("drafter", self.drafter, table, 2, 0))
        for (window, pool), own in zip(self.windows.items(), others, strict=True):
            # The row at `start` is the first of its window's tokens to be read as others are.
            pools.append((f"window {window}", pool, own, 1, max(0, start - window + 1)))
        for name, pool, own, ahead, first in pools:
            cells = self._cells(own, first, start)
            if not len(cells):
                continue
            where = f"position {{}} of {start}, {name}: "
            assert cells.min() >= 0, where.format(first + int(cells.argmin())) + "no page"
            is_wrong = pool[cells] != slot.digests[first + ahead : start + ahead]
            if is_wrong.any():
                place = int(is_wrong.argmax())
                raise AssertionError(
                    where.format(first + place) + "not what was left there: page "
                    f"{cells[place] // self.config.page_size}, {int(is_wrong.sum())} wrong"
                )
            self.tally["cells read"] += len(cells)

    def _write_target(
        self, tables: np.ndarray, start: int, values: np.ndarray, num_needed: int
    ) -> None:
        """What all layers of the target leave from `start` on; so much of it must have pages."""
        for table, pool in zip(tables, (self.target, *self.windows.values()), strict=True):
            cells = self._cells(table, start, start + len(values))
            assert cells[:num_needed].min() >= 0, f"no page for what is written from {start} on"
            self._write(pool, cells, values)

    def _write(self, pool: np.ndarray, cells: np.ndarray, values: np.ndarray) -> None:
        is_mapped = cells >= 0
        pool[cells[is_mapped]] = values[is_mapped]
