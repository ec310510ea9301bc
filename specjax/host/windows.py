"""Pages of layers that attend within a window: those behind the window are given back.

Such layers have pages and a page table of their own. Their tokens are in the same places of the
table as those of other layers; where a page was given back, the table has -1, which no row reads.
"""

from collections.abc import Collection, Hashable
from collections.abc import Sequence as SequenceOf
from typing import Any

from specjax.config import EngineConfig
from specjax.host.pages import PageAllocator


def window_pages(config: EngineConfig, window: int, max_drafts: int) -> int:
    """How many pages layers with a window have, where layers without one have `num_pages`.

    Not more than are ever in use, and if prefixes are cached, as many windows again as there are
    requests.
    """
    wanted = pages_in_use(config, window, max_drafts, config.max_num_seqs)
    if config.enable_prefix_caching:
        wanted += config.max_num_seqs * pages_before(window, config.page_size)
    most = config.num_pages if config.max_window_pages is None else config.max_window_pages
    return min(wanted, most, config.num_pages)


def pages_in_use(config: EngineConfig, window: int, max_drafts: int, num_requests: int) -> int:
    """The most pages of a window that requests have: each its window and two rounds, and all
    together the chunks of a step."""
    page_size = config.page_size
    # Three pages are used in part.
    own = pages_before(window, page_size) + -(-2 * (max_drafts + 1) // page_size) + 3
    chunks = -(-config.max_num_scheduled_tokens // page_size)
    return min(num_requests * own + chunks, num_requests * config.pages_per_seq)


def pages_before(window: int, page_size: int) -> int:
    """How many pages before a page its rows may read."""
    return -(-window // page_size)


class WindowPages:
    """The pages of all layers with the same window, by slot.

    A slot has pages from `first` up to `end` of its sequence, by their place in the page table.
    """

    def __init__(self, window: int, num_pages: int, page_size: int, page_table: Any):
        """`page_table` i32[slots, P], an array of NumPy, is kept up to date."""
        num_slots, self.window = len(page_table), window
        self.pages = PageAllocator(num_pages)
        self.reach = pages_before(window, page_size)
        self._table = page_table
        self._first, self._end = [0] * num_slots, [0] * num_slots

    def longest(self, keys: SequenceOf[Hashable], length: int) -> int:
        """The most of `length` pages of `keys` that can be continued: the window is cached."""
        place = length
        while place > max(0, length - self.reach):
            place -= 1
            if self.pages.find(keys[place]) is None:
                length = place
        return length

    def num_missing(self, slot: int, end: int) -> int:
        """How many pages the slot lacks up to `end`."""
        return max(0, end - self._end[slot])

    def admit(self, slot: int, keys: SequenceOf[Hashable]) -> None:
        """Let a slot have the cached pages that are read after the pages of `keys`."""
        end = len(keys)
        first = max(0, end - self.reach)
        pages = [self.pages.find(key) for key in keys[first:]]
        found = [page for page in pages if page is not None]
        assert len(found) == end - first, "see `longest`"
        self.pages.share(found)
        self._table[slot, first:end] = found
        self._first[slot], self._end[slot] = first, end

    def extend(self, slot: int, end: int) -> None:
        """Give a slot pages up to `end`; enough must be free."""
        begin = self._end[slot]
        if end > begin:
            self._table[slot, begin:end] = self.pages.allocate(end - begin)
            self._end[slot] = end

    def trim(self, slot: int, end: int) -> None:
        """Take back the pages from `end` on."""
        if end < self._end[slot]:
            self._release(slot, end, self._end[slot])
            self._end[slot] = end

    def slide(self, slot: int, page: int, points: Collection[int]) -> None:
        """Take back the pages that no row after the beginning of `page` reads.

        Of these only those are found again that others need who go on after `points`, as numbers of
        pages.
        """
        start, first = self._first[slot], page - self.reach
        if first <= start:
            return
        for place in range(start, first):
            is_wanted = any(place < point <= place + self.reach for point in points)
            self._release(slot, place, place + 1, forgets=not is_wanted)
        self._first[slot] = first

    def vacate(self, slot: int) -> None:
        """Take back all pages."""
        self._release(slot, self._first[slot], self._end[slot])
        self._first[slot] = self._end[slot] = 0

    def name(self, slot: int, keys: SequenceOf[Hashable], start: int, end: int) -> None:
        """Cache pages [start, end) of a slot, of those that it still has."""
        start = max(start, self._first[slot])
        for page, key in zip(self._table[slot, start:end].tolist(), keys[start:end], strict=False):
            self.pages.name(page, key)

    def _release(self, slot: int, start: int, end: int, *, forgets: bool = False) -> None:
        self.pages.release(self._table[slot, start:end].tolist(), forgets=forgets)
        self._table[slot, start:end] = -1
