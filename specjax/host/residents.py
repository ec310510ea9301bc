"""Resident sequences and their memory: each has a slot, and pages for its tokens."""

from bisect import insort

import numpy as np

from specjax.config import EngineConfig
from specjax.host.pages import PageAllocator
from specjax.host.plans import Chunk
from specjax.host.prefix_cache import Key, Prefix, PrefixCache, SnapshotIndex, extend_keys
from specjax.host.sequence import Sequence


class Residents:
    """Owns slots, pages and snapshots. It never preempts: callers do, when pages run out.

    `num_snapshots` is for recurrent models, None for others.

    Attributes:
        running: resident sequences, by their rank.
        free_slots: those without a sequence.
        page_table: i32[slots, P], the pages of each slot's sequence, then -1.
    """

    def __init__(self, config: EngineConfig, num_snapshots: int | None):
        self._config = config
        self._page_size = config.page_size
        self._num_snapshots = num_snapshots
        self._keeps_pages = config.exact  # all that a request may need, from its start to its end
        # Recurrent models find pages up to a snapshot only: those that outputs fill have none.
        self._caches_outputs = config.enable_prefix_caching and num_snapshots is None
        self._own_nothing()

    def _own_nothing(self) -> None:
        config = self._config
        self.pages = PageAllocator(config.num_pages)
        snapshots = None if self._num_snapshots is None else SnapshotIndex(self._num_snapshots)
        self.prefixes = PrefixCache(self.pages, snapshots)
        self.running: list[Sequence] = []
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.page_table = np.full((config.max_num_seqs, config.pages_per_seq), -1, np.int32)

    def drop_all(self) -> None:
        """Free all slots and pages, and keep the counters."""
        pages, snapshots = self.pages, self.prefixes.snapshots
        self._own_nothing()
        self.pages.num_evictions = pages.num_evictions
        if snapshots is not None and self.prefixes.snapshots is not None:
            self.prefixes.snapshots.num_evictions = snapshots.num_evictions

    def settle_in(self, sequence: Sequence, chunk_width: int) -> Prefix | None:
        """Give a sequence a free slot, and pages for its tokens; returns its cached prefix.

        None if too few pages are free. In exact mode chunks end after multiples of `chunk_width`
        tokens.
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
        if needed + spare > self.pages.num_free and self.running:
            self.pages.release(prefix.pages)
            return None
        pages = self.pages.allocate(needed)
        assert pages is not None, "one request always fits"
        num_cached = len(prefix.pages) * page_size
        sequence.settle_in(self.free_slots.pop(), [*prefix.pages, *pages], goal, num_cached)
        self.page_table[sequence.slot, : len(sequence.pages)] = sequence.pages
        sequence.cuts = self._cuts(sequence, keys, len(prefix.pages), chunk_width)
        insort(self.running, sequence)
        return prefix

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence pages for `num_tokens` tokens; returns whether enough were free."""
        num_pages = len(sequence.pages)
        if num_tokens <= num_pages * self._page_size:  # in most steps
            return True
        # The last token is never run through the target: its key and value need no room.
        num_tokens = min(num_tokens, sequence.max_length - 1)
        needed = -(-num_tokens // self._page_size) - num_pages
        if needed <= 0:
            return True
        pages = self.pages.allocate(needed)
        if pages is None:
            return False
        sequence.pages.extend(pages)
        self.page_table[sequence.slot, num_pages : num_pages + needed] = pages
        return True

    def vacate(self, sequence: Sequence) -> None:
        """Take back a sequence's slot and pages."""
        self.running.remove(sequence)
        slot, pages = sequence.move_out()
        self.page_table[slot] = -1
        self.free_slots.append(slot)
        self.pages.release(pages)

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
            self.page_table[sequence.slot, needed : len(sequence.pages)] = -1
            del sequence.pages[needed:]
        if num_known >= (sequence.num_named + 1) * page_size and self._caches_outputs:
            extend_keys(sequence.keys, sequence.token_ids, page_size, b"")
            self._name(sequence, num_known // page_size)

    def _name(self, sequence: Sequence, num_pages: int) -> None:
        self.prefixes.put(sequence.keys, sequence.pages, sequence.num_named, num_pages)
        sequence.num_named = min(num_pages, len(sequence.keys))

    def _cuts(
        self, sequence: Sequence, keys: list[Key], num_cached: int, chunk_width: int
    ) -> list[int]:
        """Numbers of pages after which a chunk must end, so that a snapshot can be taken."""
        config, snapshots = self._config, self.prefixes.snapshots
        is_shared = config.enable_prefix_caching or len(sequence.request.seeds) > 1
        if snapshots is None or not config.num_snapshots or not is_shared:
            return []
        points = [n for n in snapshots.points(keys) if n > num_cached]
        if config.exact:  # only where chunks end anyway
            start = num_cached * config.page_size
            points = [n for n in points if (n * config.page_size - start) % chunk_width == 0]
        return points
