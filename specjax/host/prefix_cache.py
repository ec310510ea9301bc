"""The prefix cache: pages of known prefixes and, for recurrent models, their states.

The key of a page covers all tokens up to its end, because keys and values depend on all earlier
tokens, and the token after it, because a drafter computes a position from the next token. So a
cached page is valid for both target and drafter.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from typing import NamedTuple

from specjax.host.pages import PageAllocator
from specjax.host.windows import WindowPages

MAX_SEEN = 1 << 16  # remembered page keys of prompts, to find where later prompts branch off


class PageKey(NamedTuple):
    """Identifies the contents of a page and of all pages before it."""

    digest: bytes
    next_token: int


class Prefix(NamedTuple):
    """A cached prefix of a sequence: its pages, each with one owner added, and a snapshot."""

    pages: list[int]
    snapshot: int | None = None


def extend_keys(keys: list[PageKey], tokens: SequenceOf[int], page_size: int, salt: bytes) -> None:
    """Append to `keys` the keys of further full pages of `tokens`.

    A page has a key once the token after it is known. Different salts give different keys.
    """
    digest = keys[-1].digest if keys else salt
    for end in range((len(keys) + 1) * page_size, len(tokens), page_size):
        page = array("q", tokens[end - page_size : end])
        digest = blake2b(digest + page.tobytes(), digest_size=16).digest()
        keys.append(PageKey(digest, tokens[end]))


class PrefixCache:
    """Finds cached pages for the prefix of a new sequence.

    With `snapshots`, a prefix must end at a snapshot of the recurrent states. With `windows`, the
    last pages of each window before its end must be cached too.
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
        """Return the longest cached prefix of `keys`; add one owner to its pages."""
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
        self._pages.share(pages)
        return Prefix(pages, snapshot)

    def _longest(self, keys: SequenceOf[PageKey]) -> tuple[int, int | None]:
        """Return how many pages of `keys` can be continued, and the snapshot needed for it."""
        length, last, snapshot = len(keys), -1, None
        while length != last:  # a length that suits one may not suit another
            last = length
            for window in self._windows:
                length = window.longest(keys, length)
            if self.snapshots is not None:
                length, snapshot = self.snapshots.longest(keys[:length])
        return length, snapshot

    def put(self, keys: SequenceOf[PageKey], pages: SequenceOf[int], start: int, end: int) -> None:
        """Cache pages [start, end) of a sequence."""
        for i in range(start, min(end, len(keys))):
            self._pages.name(pages[i], keys[i])

    def clear(self) -> None:
        """Clear the cache, e.g. when weights change.

        No sequence may be resident: its later pages would continue outdated pages.
        """
        self.prompts.clear()
        self._pages.forget_names()
        for window in self._windows:
            window.pages.forget_names()
        if self.snapshots is not None:
            self.snapshots.clear()


class PromptIndex:
    """Remembers prompts to find the points where they end and branch: others may continue there.

    Snapshots and window pages are kept only at these points.
    """

    def __init__(self):
        self._seen: OrderedDict[PageKey, None] = OrderedDict()

    def points(self, keys: SequenceOf[PageKey]) -> list[int]:
        """Remember a prompt; return after how many of its pages others may continue, ascending."""
        num_shared = 0
        while num_shared < len(keys) and keys[num_shared] in self._seen:
            num_shared += 1
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return sorted({num_shared, len(keys)} - {0})

    def clear(self) -> None:
        """Forget all prompts."""
        self._seen.clear()


class SnapshotIndex:
    """Snapshots of recurrent states by prefix; evicts the least recently used.

    A state costs as much memory as thousands of tokens of keys and values, so snapshots are few:
    where a prompt ends and where two prompts branched, not at every page.
    """

    def __init__(self, num_snapshots: int):
        self.num_evictions = 0
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._by_key: OrderedDict[PageKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def longest(self, keys: SequenceOf[PageKey]) -> tuple[int, int | None]:
        """Return the number of pages before the last snapshot within `keys`, and its id."""
        for length in range(len(keys), 0, -1):
            if keys[length - 1] in self._by_key:
                self._by_key.move_to_end(keys[length - 1])
                return length, self._by_key[keys[length - 1]]
        return 0, None

    def reserve(self, key: PageKey) -> int | None:
        """Return an id for a new snapshot; None if the prefix has one, or there is no room."""
        if key in self._by_key or not (self._free or self._by_key):
            return None
        if not self._free:
            self._free.append(self._by_key.popitem(last=False)[1])
            self.num_evictions += 1
        return self._free.pop()

    def put(self, key: PageKey, snapshot: int) -> None:
        """Publish a snapshot that was reserved."""
        if key in self._by_key:  # two sequences reached it in one step
            self._free.append(snapshot)
        else:
            self._by_key[key] = snapshot

    def clear(self) -> None:
        """Evict every snapshot."""
        self._free += self._by_key.values()
        self._by_key.clear()
