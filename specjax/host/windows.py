"""Manages the pages of sliding-window layers. Pages behind the window are freed.

Layers with the same window have separate pages and a separate page table. This table is indexed
like the page table of layers without a window. The entry of a freed page is -1.
"""

from collections.abc import Collection, Hashable
from collections.abc import Sequence as SequenceOf
from typing import Any

from specjax.config import EngineConfig
from specjax.host.pages import PageAllocator


def window_pages(config: EngineConfig, window: int, max_drafts: int) -> int:
    """Return the number of pages to allocate for layers with a window.

    This is the maximum number of pages in use. With prefix caching, the pages of one more window
    per request are added. The result is at most the option `num_pages`, and at most the option
    `max_window_pages` if this is set.
    """
    wanted = pages_in_use(config, window, max_drafts, config.max_num_seqs)
    if config.enable_prefix_caching:
        wanted += config.max_num_seqs * pages_before(window, config.page_size)
    most = config.num_pages if config.max_window_pages is None else config.max_window_pages
    return min(wanted, most, config.num_pages)


def pages_in_use(config: EngineConfig, window: int, max_drafts: int, num_requests: int) -> int:
    """Return the maximum number of window pages that `num_requests` requests use at once.

    Each request uses pages for its window and for two rounds, because a round is planned while the
    round before it is in flight. All requests together use pages for the chunks of one step.
    """
    page_size = config.page_size
    # Three pages may be partly used.
    own = pages_before(window, page_size) + -(-2 * (max_drafts + 1) // page_size) + 3
    chunks = -(-config.max_num_scheduled_tokens // page_size)
    return min(num_requests * own + chunks, num_requests * config.pages_per_seq)


def pages_before(window: int, page_size: int) -> int:
    """Return the maximum number of pages that a token attends to, in addition to its own page."""
    return -(-window // page_size)


class WindowPages:
    """The pages, by slot, of all layers with the same window.

    A slot is a row of the page table, for one resident request. The request has window pages at the
    indices [first, end) of this row.
    """

    def __init__(self, window: int, num_pages: int, page_size: int, page_table: Any):
        """`page_table` is a NumPy array i32[slots, P], which this object updates."""
        num_slots, self.window = len(page_table), window
        self.pages = PageAllocator(num_pages)
        self.reach = pages_before(window, page_size)
        self._table = page_table
        self._first, self._end = [0] * num_slots, [0] * num_slots

    def longest(self, keys: SequenceOf[Hashable], length: int) -> int:
        """Return how many of the first `length` pages a sequence can reuse.

        This is the largest n for which all pages in the last window of the prefix `keys[:n]` are
        cached.
        """
        place = length
        while place > max(0, length - self.reach):
            place -= 1
            if self.pages.find(keys[place]) is None:
                length = place
        return length

    def num_missing(self, slot: int, end: int) -> int:
        """Return how many pages `extend` would give to the request in a slot."""
        return max(0, end - self._end[slot])

    def admit(self, slot: int, keys: SequenceOf[Hashable]) -> None:
        """Give a request the cached pages in the last window of a prefix.

        `keys` holds the key of each page of the prefix.
        """
        end = len(keys)
        first = max(0, end - self.reach)
        pages = [self.pages.find(key) for key in keys[first:]]
        found = [page for page in pages if page is not None]
        assert len(found) == end - first, "see `longest`"
        self.pages.share(found)
        self._table[slot, first:end] = found
        self._first[slot], self._end[slot] = first, end

    def extend(self, slot: int, end: int) -> None:
        """Give a request pages up to the index `end`. Enough pages must be free."""
        begin = self._end[slot]
        if end > begin:
            self._table[slot, begin:end] = self.pages.allocate(end - begin)
            self._end[slot] = end

    def trim(self, slot: int, end: int) -> None:
        """Free a request's pages from the index `end` on."""
        if end < self._end[slot]:
            self._release(slot, end, self._end[slot])
            self._end[slot] = end

    def slide(self, slot: int, page: int, points: Collection[int]) -> None:
        """Free the pages that a request no longer reads, because its window has moved on.

        Args:
            slot: the request's slot.
            page: page-table index of the page with the last token before the next token to run.
            points: points after which a later request can continue, as numbers of leading pages. A
                freed page stays cached only if a request that continues after one of these points
                would read the page.
        """
        start, first = self._first[slot], page - self.reach
        if first <= start:
            return
        for place in range(start, first):
            is_wanted = any(place < point <= place + self.reach for point in points)
            self._release(slot, place, place + 1, forgets=not is_wanted)
        self._first[slot] = first

    def vacate(self, slot: int) -> None:
        """Free all window pages of the request in a slot."""
        self._release(slot, self._first[slot], self._end[slot])
        self._first[slot] = self._end[slot] = 0

    def name(self, slot: int, keys: SequenceOf[Hashable], start: int, end: int) -> None:
        """Cache a request's pages [start, end) by their keys, except pages that were freed."""
        start = max(start, self._first[slot])
        for page, key in zip(self._table[slot, start:end].tolist(), keys[start:end], strict=False):
            self.pages.name(page, key)

    def _release(self, slot: int, start: int, end: int, *, forgets: bool = False) -> None:
        self.pages.release(self._table[slot, start:end].tolist(), forgets=forgets)
        self._table[slot, start:end] = -1
