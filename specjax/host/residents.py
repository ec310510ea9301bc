"""The resident sequences: those that have a slot (a row of the device's state) and pages."""

from array import array
from bisect import insort
from collections.abc import Sequence as SequenceOf

import numpy as np

from specjax.config import EngineConfig
from specjax.host.pages import PageAllocator
from specjax.host.plans import Chunk
from specjax.host.prefix_cache import PageKey, PrefixCache, SnapshotIndex, extend_keys
from specjax.host.residency import Residency
from specjax.host.sequence import Sequence
from specjax.host.windows import WindowPages, window_pages


class Residents:
    """Owns slots, pages and snapshots. If pages run out, the caller has to preempt sequences.

    Attributes:
        running: resident sequences, in order of rank.
        free_slots: slots without a sequence.
        pages: allocator of the pages that drafters and layers without a window use.
        windows: for each window size, the pages of layers with this window.
        page_tables: array i32[slots, 1 + windows, P] of each slot's pages; -1 for no page.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_snapshots: int | None,
        windows: SequenceOf[int] = (),
        max_drafts: int = 0,
    ):
        """`num_snapshots` is None unless the model is recurrent. `windows` has sizes in tokens."""
        self._config = config
        self._page_size = config.page_size
        self._num_snapshots = num_snapshots
        self._windows = [(one, window_pages(config, one, max_drafts)) for one in windows]
        self._keeps_pages = config.exact  # a sequence has all pages that it may need from the start
        # Recurrent models reuse pages only up to a snapshot; outputs have no snapshots.
        self._caches_outputs = config.enable_prefix_caching and num_snapshots is None
        self._takes_snapshots = num_snapshots is not None and config.num_snapshots > 0
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
        # By page: the sequence, first in order of rank, that will compute it for others to go on.
        self._pending: dict[PageKey, Sequence] = {}
        self.running: list[Sequence] = []
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    @property
    def pools(self) -> tuple[PageAllocator, ...]:
        """The allocator `pages`, and the allocator of each window size."""
        return self.pages, *(window.pages for window in self.windows)

    def drop_all(self) -> None:
        """Free all slots and pages, but keep the counts of evictions."""
        pools, snapshots = self.pools, self.prefixes.snapshots
        self._own_nothing()
        for pool, before in zip(self.pools, pools, strict=True):
            pool.num_evictions = before.num_evictions
        if snapshots is not None and self.prefixes.snapshots is not None:
            self.prefixes.snapshots.num_evictions = snapshots.num_evictions

    def extend_keys(self, sequence: Sequence) -> None:
        """Compute the keys of a sequence's full pages, as far as they are not known yet."""
        salt = b"" if self._config.enable_prefix_caching else str(sequence.arrival).encode()
        extend_keys(sequence.keys, sequence.token_ids, self._page_size, salt)

    def num_to_run(self, sequence: Sequence) -> int:
        """Return how many tokens a waiting sequence would have to run if it were admitted now.

        Return 0 if the sequence should wait, because a resident sequence ahead of it is about to
        compute at least half of these tokens. If the keys are not known yet, nothing counts as
        cached.
        """
        page_size, keys = self._page_size, self._known_keys(sequence)
        keys = keys[: sequence.max_found // page_size]
        length = num_found = len(self.prefixes.find(keys).pages)
        num_left = _num_to_prefill(sequence) - num_found * page_size
        if self._pending:
            for i in range(num_found, len(keys)):
                leader = self._pending.get(keys[i])
                if leader is not None and leader < sequence:
                    length = i + 1
        return 0 if 2 * (length - num_found) * page_size >= num_left else num_left

    def admit(
        self, sequence: Sequence, chunk_width: int, first_chunk: int
    ) -> tuple[Residency, int | None] | None:
        """Give a sequence a free slot, and pages for its tokens.

        Return the sequence's residency and the id of the snapshot to restore (None if there is
        none). If too few pages are free, return None instead of this pair. The sequence must have
        its keys, see `extend_keys`.

        Args:
            chunk_width: with the option `exact`, chunks end after multiples of this number of
                tokens, so snapshots are taken only there.
            first_chunk: maximum number of tokens of the first chunk. Enough window pages for these
                tokens must be free. These pages are not allocated here, but later by `grow`.
        """
        page_size, exact = self._config.page_size, self._config.exact
        num_to_prefill, keys = _num_to_prefill(sequence), self._known_keys(sequence)
        prefix = self.prefixes.take(keys[: sequence.max_found // page_size])
        max_tokens = sequence.request.max_length - 1 if exact else num_to_prefill
        needed = -(-max_tokens // page_size) - len(prefix.pages)
        # Spare a page for each running sequence, which might otherwise preempt this sequence soon.
        spare = 0 if exact else len(self.running)
        num_found = len(prefix.pages)
        first_end = -(-min(num_to_prefill, num_found * page_size + first_chunk) // page_size)
        is_full = needed + spare > self.pages.num_free or any(
            first_end - num_found + min(num_found, window.reach) + spare > window.pages.num_free
            for window in self.windows
        )
        if is_full and self.running:
            self.pages.release(prefix.pages)
            return None
        pages = self.pages.allocate(needed)
        assert pages is not None, "one request always fits"
        pages = array("i", [*prefix.pages, *pages])
        slot, branch_points = self.free_slots.pop(), self._branch_points(sequence, keys, num_found)
        residency = Residency(
            slot=slot,
            num_to_prefill=num_to_prefill,
            num_computed=num_found * page_size,
            num_published_pages=num_found,
            pages=pages,
            token_capacity=(num_found if self.windows else len(pages)) * page_size,
            snapshot_points=self._snapshot_points(branch_points, num_found, chunk_width),
            branch_points=branch_points,
        )
        sequence.admit(residency)
        self._page_table[slot, : len(pages)] = pages
        for window in self.windows:
            window.admit(slot, keys[:num_found])
        insort(self.running, sequence)
        for key in self._pending_keys(sequence, residency):
            self._pending[key] = min(self._pending.get(key, sequence), sequence)
        return residency, prefix.snapshot

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence pages for `num_tokens` tokens; return whether enough pages were free."""
        residency = sequence.residency
        assert residency is not None
        # The last token is never run through the target: its key and value need no room.
        num_tokens = min(num_tokens, max(residency.num_to_prefill, sequence.max_length - 1))
        if num_tokens <= residency.token_capacity:
            return True
        slot, num_pages = residency.slot, len(residency.pages)
        end = -(-num_tokens // self._page_size)
        if self.windows and any(
            window.num_missing(slot, end) > window.pages.num_free for window in self.windows
        ):
            return False
        pages = self.pages.allocate(max(0, end - num_pages))
        if pages is None:
            return False
        residency.pages.extend(pages)
        self._page_table[slot, num_pages : num_pages + len(pages)] = pages
        for window in self.windows:
            window.extend(slot, end)
        residency.token_capacity = end * self._page_size
        return True

    def slide(self) -> None:
        """Free the pages of sliding-window layers that no later step reads."""
        if not self.windows:
            return
        for sequence in self.running:
            residency = sequence.residency
            assert residency is not None
            # Keep the page before the next row, so that other sequences can continue there.
            if residency.is_prefilled:
                next_row = sequence.min_length - 1
            else:
                next_row = residency.num_computed
            page = (next_row - 1) // self._page_size
            if page > residency.window_page:
                residency.window_page = page
                for window in self.windows:
                    window.slide(residency.slot, page, residency.branch_points)

    def vacate(self, sequence: Sequence) -> None:
        """Free a sequence's slot and pages."""
        self.running.remove(sequence)
        residency = sequence.residency
        assert residency is not None
        self._forget_pending(sequence, residency)
        sequence.residency = None
        self._page_table[residency.slot] = -1
        self.free_slots.append(residency.slot)
        self.pages.release(residency.pages)
        for window in self.windows:
            window.vacate(residency.slot)

    def reserve_snapshot(self, sequence: Sequence, residency: Residency) -> int | None:
        """Return the id of the snapshot to take after the planned chunk; None if none is taken."""
        points = residency.snapshot_points
        if not points or residency.num_computed < points[0] * self._page_size:
            return None
        assert self.prefixes.snapshots is not None
        return self.prefixes.snapshots.reserve(sequence.keys[points.pop(0) - 1])

    def publish(self, chunk: Chunk) -> None:
        """Add the pages and the snapshot of a chunk to the prefix cache."""
        page_size, snapshots = self._config.page_size, self.prefixes.snapshots
        sequence, end = chunk.sequence, chunk.start + chunk.count
        assert sequence.residency is not None
        self._name(sequence, sequence.residency, end // page_size)
        if chunk.taken is not None and snapshots is not None:
            snapshots.put(sequence.keys[end // page_size - 1], chunk.taken)

    def tidy(self, sequence: Sequence, residency: Residency) -> None:
        """Free pages that no step in flight can need, and cache full pages of the output.

        Pages of the output are cached only with prefix caching, and not for recurrent models. With
        the option `exact`, or while the sequence is being prefilled, do nothing.
        """
        if self._keeps_pages or residency.num_computed < residency.num_to_prefill:
            return
        page_size, num_known = self._page_size, len(sequence.token_ids) - 1
        max_tokens = num_known + sequence.max_tokens_in_flight
        pages = residency.pages
        if max_tokens <= (len(pages) - 1) * page_size:
            needed = -(-max_tokens // page_size)
            self.pages.release(pages[needed:])
            self._page_table[residency.slot, needed : len(pages)] = -1
            del pages[needed:]
            for window in self.windows:
                window.trim(residency.slot, needed)
            residency.token_capacity = needed * page_size
        if num_known >= (residency.num_published_pages + 1) * page_size and self._caches_outputs:
            extend_keys(sequence.keys, sequence.token_ids, page_size, b"")
            self._name(sequence, residency, num_known // page_size)

    def _name(self, sequence: Sequence, residency: Residency, num_pages: int) -> None:
        """Make sure that the first `num_pages` pages of a sequence are in the prefix cache."""
        keys, start = sequence.keys, residency.num_published_pages
        if self._pending:
            self._forget_pending(sequence, residency, num_pages)
        self.prefixes.put(keys, residency.pages, start, num_pages)
        for window in self.windows:
            window.name(residency.slot, keys, start, num_pages)
        residency.num_published_pages = min(num_pages, len(keys))

    def _known_keys(self, sequence: Sequence) -> list[PageKey]:
        """Return the known keys of the pages that a sequence could take from the prefix cache.

        At least one token must be run, so the page with the last token to prefill is left out.
        """
        return sequence.keys[: (_num_to_prefill(sequence) - 1) // self._page_size]

    def _pending_keys(self, sequence: Sequence, residency: Residency) -> list[PageKey]:
        """Return the keys of pages that `sequence` will compute and other sequences can reuse.

        A key is returned only if another sequence can continue after its page. In recurrent models,
        this is possible only at snapshot points; with windows, only at branch points.
        """
        keys, num_found = self._known_keys(sequence), residency.num_published_pages
        if self._num_snapshots is not None:
            return [keys[n - 1] for n in residency.snapshot_points]
        if self.windows:
            return [keys[n - 1] for n in residency.branch_points if n > num_found]
        return keys[num_found:]

    def _forget_pending(
        self, sequence: Sequence, residency: Residency, end: int | None = None
    ) -> None:
        """Let no other sequence wait for this sequence's pages before the index `end`.

        If `end` is None, let no other sequence wait for any page of this sequence.
        """
        for key in sequence.keys[residency.num_published_pages : end]:
            if self._pending.get(key) is sequence:
                del self._pending[key]

    def _branch_points(
        self, sequence: Sequence, keys: list[PageKey], num_found: int
    ) -> tuple[int, ...]:
        """Return the branch points: numbers of leading pages that other sequences may share.

        The window pages before each branch point stay cached.
        """
        is_shared = self._config.enable_prefix_caching or len(sequence.request.seeds) > 1
        if not is_shared or not (self._takes_snapshots or self.windows):
            return ()
        return num_found, *self.prefixes.prompts.points(keys)

    def _snapshot_points(
        self, branch_points: tuple[int, ...], num_found: int, chunk_width: int
    ) -> list[int]:
        """Return the numbers of leading pages after which to take a snapshot of recurrent states.

        `branch_points` are the points at which the prompt ends, or differs from earlier prompts.
        The result has the branch points after the cached prefix, which has `num_found` pages. A
        chunk must end at each of these points. With the option `exact`, chunks end only after
        multiples of `chunk_width` tokens, so all other points are left out.
        """
        if not self._takes_snapshots:
            return []
        points = [n for n in branch_points if n > num_found]
        if self._config.exact:  # only points where chunks end anyway
            points = [n for n in points if (n - num_found) * self._page_size % chunk_width == 0]
        return points


def _num_to_prefill(sequence: Sequence) -> int:
    """Return the number of tokens that a sequence runs before it decodes."""
    return len(sequence.token_ids) - (sequence.num_output > 0)
