"""Resident sequences and their memory: each has a slot, and pages for its tokens."""

from bisect import insort
from collections.abc import Sequence as SequenceOf

import numpy as np

from specjax.config import EngineConfig
from specjax.host.pages import PageAllocator
from specjax.host.plans import Chunk
from specjax.host.prefix_cache import Key, Prefix, PrefixCache, SnapshotIndex, extend_keys
from specjax.host.sequence import Sequence
from specjax.host.windows import WindowPages, window_pages


class Residents:
    """Owns slots, pages and snapshots. It never preempts: callers do, when pages run out.

    Attributes:
        running: resident sequences, by their rank.
        free_slots: those without a sequence.
        pages: those of layers without a window, and of drafters.
        windows: the pages of other layers.
        page_tables: i32[slots, 1 + windows, P], the pages of each slot's sequence, -1 for none.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_snapshots: int | None,
        windows: SequenceOf[int] = (),
        max_drafts: int = 0,
    ):
        """`num_snapshots` is for recurrent models, None for others; `windows` are of layers."""
        self._config = config
        self._page_size = config.page_size
        self._num_snapshots = num_snapshots
        self._windows = [(one, window_pages(config, one, max_drafts)) for one in windows]
        self._keeps_pages = config.exact  # all that a request may need, from its start to its end
        # Recurrent models find pages up to a snapshot only: those that outputs fill have none.
        self._caches_outputs = config.enable_prefix_caching and num_snapshots is None
        self._own_nothing()

    def _own_nothing(self) -> None:
        config = self._config
        self.pages = PageAllocator(config.num_pages)
        shape = config.max_num_seqs, 1 + len(self._windows), config.pages_per_seq
        self.page_tables = np.full(shape, -1, np.int32)
        self._page_table, *others = self.page_tables.swapaxes(0, 1)
        self.windows = tuple(
            WindowPages(*sizes, config.page_size, table)
            for sizes, table in zip(self._windows, others, strict=True)
        )
        snapshots = None if self._num_snapshots is None else SnapshotIndex(self._num_snapshots)
        self.prefixes = PrefixCache(self.pages, snapshots, self.windows)
        self.running: list[Sequence] = []
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    @property
    def pools(self) -> tuple[PageAllocator, ...]:
        """The allocators of `pages` and of each window."""
        return self.pages, *(window.pages for window in self.windows)

    def drop_all(self) -> None:
        """Free all slots and pages, and keep the counters."""
        pools, snapshots = self.pools, self.prefixes.snapshots
        self._own_nothing()
        for pool, before in zip(self.pools, pools, strict=True):
            pool.num_evictions = before.num_evictions
        if snapshots is not None and self.prefixes.snapshots is not None:
            self.prefixes.snapshots.num_evictions = snapshots.num_evictions

    def settle_in(self, sequence: Sequence, chunk_width: int, first_chunk: int) -> Prefix | None:
        """Give a sequence a free slot, and pages for its tokens; returns its cached prefix.

        None if too few pages are free. In windows it gets none for tokens beyond the prefix, but
        there are enough for a chunk of up to `first_chunk` tokens. In exact mode chunks end after
        multiples of `chunk_width` tokens.
        """
        page_size, exact = self._config.page_size, self._config.exact
        tokens = sequence.token_ids
        goal = len(tokens) - (sequence.num_output > 0)
        salt = b"" if self._config.enable_prefix_caching else str(sequence.arrival).encode()
        extend_keys(sequence.keys, tokens, page_size, salt)
        keys = sequence.keys[: (goal - 1) // page_size]  # at least one token must be run
        prefix = self.prefixes.take(keys[: sequence.max_found // page_size])
        max_tokens = sequence.request.max_length - 1 if exact else goal
        needed = -(-max_tokens // page_size) - len(prefix.pages)
        # Keep a page for each running sequence, or one would preempt this at once.
        spare = 0 if exact else len(self.running)
        num_found = len(prefix.pages)
        first_end = -(-min(goal, num_found * page_size + first_chunk) // page_size)
        is_full = needed + spare > self.pages.num_free or any(
            first_end - num_found + min(num_found, window.reach) + spare > window.pages.num_free
            for window in self.windows
        )
        if is_full and self.running:
            self.pages.release(prefix.pages)
            return None
        pages = self.pages.allocate(needed)
        assert pages is not None, "one request always fits"
        num_cached = num_found * page_size
        sequence.settle_in(self.free_slots.pop(), [*prefix.pages, *pages], goal, num_cached)
        self._page_table[sequence.slot, : len(sequence.pages)] = sequence.pages
        sequence.room = (num_found if self.windows else len(sequence.pages)) * page_size
        for window in self.windows:
            window.settle_in(sequence.slot, keys[:num_found])
        self._set_points(sequence, keys, num_found, chunk_width)
        insort(self.running, sequence)
        return prefix

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence pages for `num_tokens` tokens; returns whether enough were free."""
        if num_tokens <= sequence.room:  # in most steps
            return True
        # The last token is never run through the target: its key and value need no room.
        num_tokens = min(num_tokens, max(sequence.goal, sequence.max_length - 1))
        if num_tokens <= sequence.room:
            return True
        slot, num_pages, end = sequence.slot, len(sequence.pages), -(-num_tokens // self._page_size)
        if self.windows and any(
            window.num_missing(slot, end) > window.pages.num_free for window in self.windows
        ):
            return False
        pages = self.pages.allocate(max(0, end - num_pages))
        if pages is None:
            return False
        sequence.pages.extend(pages)
        self._page_table[slot, num_pages : num_pages + len(pages)] = pages
        for window in self.windows:
            window.extend(slot, end)
        sequence.room = end * self._page_size
        return True

    def slide(self) -> None:
        """Take back the pages of windows that no later step reads."""
        if not self.windows:
            return
        for sequence in self.running:
            # The page before the next row is kept, so that the tokens up to it can be continued.
            page = (sequence.min_computed - 1) // self._page_size
            if page > sequence.slid_to:
                sequence.slid_to = page
                for window in self.windows:
                    window.slide(sequence.slot, page, sequence.points)

    def vacate(self, sequence: Sequence) -> None:
        """Take back a sequence's slot and pages."""
        self.running.remove(sequence)
        slot, pages = sequence.move_out()
        self._page_table[slot] = -1
        self.free_slots.append(slot)
        self.pages.release(pages)
        for window in self.windows:
            window.vacate(slot)

    def reserve_snapshot(self, sequence: Sequence) -> int | None:
        """The id of a snapshot to take at the end of the computed tokens, if one is wanted."""
        page_size = self._config.page_size
        if not sequence.cuts or sequence.num_computed < sequence.cuts[0] * page_size:
            return None
        assert self.prefixes.snapshots is not None
        return self.prefixes.snapshots.reserve(sequence.keys[sequence.cuts.pop(0) - 1])

    def publish(self, chunk: Chunk) -> None:
        """Cache the pages and the snapshot of a chunk for later steps."""
        page_size, snapshots = self._config.page_size, self.prefixes.snapshots
        sequence, end = chunk.sequence, chunk.start + chunk.count
        self._name(sequence, end // page_size)
        if chunk.taken is not None and snapshots is not None:
            snapshots.put(sequence.keys[end // page_size - 1], chunk.taken)

    def tidy(self, sequence: Sequence) -> None:
        """Free pages that no step in flight can need, and cache those that are full."""
        if self._keeps_pages or sequence.num_computed < sequence.goal:
            return
        page_size, num_known = self._page_size, len(sequence.token_ids) - 1
        max_tokens = num_known + sequence.max_tokens_in_flight
        if max_tokens <= (len(sequence.pages) - 1) * page_size:
            needed = -(-max_tokens // page_size)
            self.pages.release(sequence.pages[needed:])
            self._page_table[sequence.slot, needed : len(sequence.pages)] = -1
            del sequence.pages[needed:]
            for window in self.windows:
                window.trim(sequence.slot, needed)
            sequence.room = needed * page_size
        if num_known >= (sequence.num_named + 1) * page_size and self._caches_outputs:
            extend_keys(sequence.keys, sequence.token_ids, page_size, b"")
            self._name(sequence, num_known // page_size)

    def _name(self, sequence: Sequence, num_pages: int) -> None:
        self.prefixes.put(sequence.keys, sequence.pages, sequence.num_named, num_pages)
        for window in self.windows:
            window.name(sequence.slot, sequence.keys, sequence.num_named, num_pages)
        sequence.num_named = min(num_pages, len(sequence.keys))

    def _set_points(
        self, sequence: Sequence, keys: list[Key], num_cached: int, chunk_width: int
    ) -> None:
        """Choose where other sequences can go on from: there the pages of windows stay cached.

        A chunk must end there, so that a snapshot can be taken.
        """
        config = self._config
        takes_snapshots = self._num_snapshots is not None and config.num_snapshots > 0
        is_shared = config.enable_prefix_caching or len(sequence.request.seeds) > 1
        sequence.cuts, sequence.points = [], ()
        if not is_shared or not (takes_snapshots or self.windows):
            return
        points = self.prefixes.prompts.points(keys)
        sequence.points = num_cached, *points
        if not takes_snapshots:
            return
        cuts = [n for n in points if n > num_cached]
        if config.exact:  # only where chunks end anyway
            start = num_cached * config.page_size
            cuts = [n for n in cuts if (n * config.page_size - start) % chunk_width == 0]
        sequence.cuts = cuts
