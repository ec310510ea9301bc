"""The prefix cache: pages of known prefixes and, for recurrent models, snapshots of states.

A page is found by its `PageKey`. The key covers all tokens up to the page's end, because attention
keys and values depend on all earlier tokens. The key also covers the token after the page, because
a drafter's cached values at a position may depend on the next token. So a cached page is valid for
both the target and the drafter.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from typing import NamedTuple

from specjax.host.pages import PageAllocator
from specjax.host.windows import WindowPages

MAX_SEEN = 1 << 16  # default number of page keys that `PromptIndex` remembers


class PageKey(NamedTuple):
    """Identifies the contents of a page and of all pages before it."""

    digest: bytes
    next_token: int


class Prefix(NamedTuple):
    """A cached prefix of a sequence.

    `snapshot` is the id of the snapshot at the prefix's end, or None if there is none.
    """

    pages: list[int]
    snapshot: int | None = None


def extend_keys(keys: list[PageKey], tokens: SequenceOf[int], page_size: int, salt: bytes) -> None:
    """Append to `keys` a key for each full page of `tokens` that has no key yet.

    A page has a key only once the token after the page is known. Different values of `salt` give
    different keys.
    """
    digest = keys[-1].digest if keys else salt
    for end in range((len(keys) + 1) * page_size, len(tokens), page_size):
        page = array("q", tokens[end - page_size : end])
        digest = blake2b(digest + page.tobytes(), digest_size=16).digest()
        keys.append(PageKey(digest, tokens[end]))


class PrefixCache:
    """Finds cached pages for the prefix of a new sequence.

    For recurrent models (`snapshots`), only a prefix that ends at a snapshot of the states can be
    reused. If some layers have sliding windows (`windows`), these layers need only the pages of the
    prefix's last window. A prefix can be reused only if these pages are still cached.
    """

    def __init__(
        self,
        pages: PageAllocator,
        snapshots: "SnapshotIndex | None" = None,
        windows: SequenceOf[WindowPages] = (),
    ):
        self.snapshots = snapshots
        self.prompts = PromptIndex()
        self._pages = pages
        self._windows = windows

    def take(self, keys: SequenceOf[PageKey]) -> Prefix:
        """Return the longest cached prefix of `keys`, and add one owner to each of its pages."""
        prefix = self.find(keys)
        self._pages.share(prefix.pages)
        return prefix

    def find(self, keys: SequenceOf[PageKey]) -> Prefix:
        """Return the longest cached prefix of `keys`, without becoming an owner of its pages."""
        pages = []
        for key in keys:
            page = self._pages.find(key)
            if page is None:
                break
            pages.append(page)
        snapshot = None
        if self._windows or self.snapshots is not None:
            length, snapshot = self._longest(keys[: len(pages)])
            del pages[length:]
        return Prefix(pages, snapshot)

    def _longest(self, keys: SequenceOf[PageKey]) -> tuple[int, int | None]:
        """Return how many leading pages of `keys` a request can reuse, and the id of a snapshot.

        The request resumes from this snapshot of the recurrent states. The id is None if there is
        no snapshot to resume from.
        """
        length, last, snapshot = len(keys), -1, None
        while length != last:  # a length that suits one window may not suit another
            last = length
            for window in self._windows:
                length = window.longest(keys, length)
            if self.snapshots is not None:
                length, snapshot = self.snapshots.longest(keys[:length])
        return length, snapshot

    def put(self, keys: SequenceOf[PageKey], pages: SequenceOf[int], start: int, end: int) -> None:
        """Cache the pages [start, end) of a sequence by their keys.

        `pages` and `keys` belong to the whole sequence. A page without a key is not cached.
        """
        for i in range(start, min(end, len(keys))):
            self._pages.name(pages[i], keys[i])

    def clear(self) -> None:
        """Clear the cache, for example when weights change.

        Call this only while no sequence is resident. A resident sequence would go on filling pages,
        and these pages would be cached, although their contents depend on outdated pages.
        """
        self.prompts.clear()
        self._pages.forget_names()
        for window in self._windows:
            window.pages.forget_names()
        if self.snapshots is not None:
            self.snapshots.clear()


class PromptIndex:
    """Remembers prompts, to find the points at which they end or branch.

    Later prompts may have the same tokens up to one of these points, and then reuse the pages and
    states cached there. So snapshots of recurrent states and pages of sliding-window layers are
    kept for these points only. The keys of the latest `max_seen` pages are remembered.
    """

    def __init__(self, max_seen: int = MAX_SEEN):
        self._seen: OrderedDict[PageKey, None] = OrderedDict()
        self._max_seen = max_seen

    def longest(self, keys: SequenceOf[PageKey]) -> int:
        """Return how many leading pages of a prompt also belong to remembered prompts."""
        num_shared = 0
        while num_shared < len(keys) and keys[num_shared] in self._seen:
            num_shared += 1
        return num_shared

    def points(self, keys: SequenceOf[PageKey]) -> list[int]:
        """Remember a prompt. Return the points at which it ends, or branches off from others.

        `keys` are the keys of the prompt's full pages. A point is a number of leading pages, at
        least 1. Points are in ascending order.
        """
        num_shared = self.longest(keys)
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)
        return sorted({num_shared, len(keys)} - {0})

    def clear(self) -> None:
        """Forget all prompts."""
        self._seen.clear()


class SnapshotIndex:
    """Finds snapshots of recurrent states by prefix, and evicts the least recently used snapshot.

    A state takes as much memory as the keys and values of thousands of tokens. So snapshots are
    taken only where a prompt ends or two prompts branch, and not after every page.
    """

    def __init__(self, num_snapshots: int):
        self.num_evictions = 0
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._by_key: OrderedDict[PageKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def longest(self, keys: SequenceOf[PageKey]) -> tuple[int, int | None]:
        """Find the longest prefix of `keys` that has a snapshot.

        Return the prefix's number of pages and the snapshot's id, and count the snapshot as the
        most recently used one. If no prefix has a snapshot, return (0, None).
        """
        for length in range(len(keys), 0, -1):
            if keys[length - 1] in self._by_key:
                self._by_key.move_to_end(keys[length - 1])
                return length, self._by_key[keys[length - 1]]
        return 0, None

    def reserve(self, key: PageKey) -> int | None:
        """Return the id for a new snapshot at the end of the page with this key.

        If no id is free, evict the least recently used snapshot. Return None if there already is a
        snapshot for `key`, or if no snapshot can be evicted.
        """
        if key in self._by_key or not (self._free or self._by_key):
            return None
        if not self._free:
            self._free.append(self._by_key.popitem(last=False)[1])
            self.num_evictions += 1
        return self._free.pop()

    def put(self, key: PageKey, snapshot: int) -> None:
        """Add a reserved snapshot to the index, so that later requests find it.

        If there already is a snapshot for `key`, free the id of the new one instead.
        """
        if key in self._by_key:  # two sequences took it in one step
            self._free.append(snapshot)
        else:
            self._by_key[key] = snapshot

    def clear(self) -> None:
        """Evict every snapshot."""
        self._free += self._by_key.values()
        self._by_key.clear()
