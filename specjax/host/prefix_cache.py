"""Prefixes that have been run before: their pages and, for recurrent models, their states.

A page is known by the tokens up to its end and the one that follows. The first, since keys and
values depend on all tokens before; the other, since a drafter's at a position are made with the
next token. So what is found is true for the target and for the drafter.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from typing import NamedTuple

from specjax.host.pages import PageAllocator

MAX_SEEN = 1 << 16  # keys of prompts that are remembered to find where later ones branch off


class Key(NamedTuple):
    """What a page holds, and all pages before it."""

    digest: bytes
    next_token: int


class Prefix(NamedTuple):
    """The beginning of a sequence that need not be run: shares of its pages, and a snapshot."""

    pages: list[int]
    snapshot: int | None = None


def extend_keys(keys: list[Key], tokens: SequenceOf[int], page_size: int, salt: bytes) -> None:
    """Append the keys of the pages of `tokens` that are not among `keys` yet.

    A page has a key once the token after it is known. Those of another `salt` are others.
    """
    digest = keys[-1].digest if keys else salt
    for end in range((len(keys) + 1) * page_size, len(tokens), page_size):
        page = array("q", tokens[end - page_size : end])
        digest = blake2b(digest + page.tobytes(), digest_size=16).digest()
        keys.append(Key(digest, tokens[end]))


class PrefixCache:
    """Finds the pages that a new sequence may begin with.

    With `snapshots` it finds none without a snapshot of the states where they end.
    """

    def __init__(self, pages: PageAllocator, snapshots: "SnapshotIndex | None" = None):
        self.snapshots = snapshots
        self._pages = pages

    def take(self, keys: SequenceOf[Key]) -> Prefix:
        """Shares of the longest run of pages of `keys` that there is."""
        pages = []
        for key in keys:
            page = self._pages.find(key)
            if page is None:
                break
            pages.append(page)
        snapshot = None
        if self.snapshots is not None:
            length, snapshot = self.snapshots.longest(keys[: len(pages)])
            del pages[length:]
        self._pages.share(pages)
        return Prefix(pages, snapshot)

    def put(self, keys: SequenceOf[Key], pages: SequenceOf[int], start: int, end: int) -> None:
        """Let pages [start, end) of a sequence be found from now on."""
        for i in range(start, min(end, len(keys))):
            self._pages.name(pages[i], keys[i])

    def clear(self) -> None:
        """Find nothing of what has been put so far, as when weights change.

        Nobody may be in residence: what they put later would rest on pages from before.
        """
        self._pages.forget_names()
        if self.snapshots is not None:
            self.snapshots.clear()


class SnapshotIndex:
    """Which prefixes have a snapshot of their recurrent states, the least recently used given up.

    A state costs as much memory as thousands of tokens of keys and values, so snapshots are few:
    where a prompt ends, and where two prompts were seen to branch, never one per page.
    """

    def __init__(self, num_snapshots: int):
        self.num_evictions = 0
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._by_key: OrderedDict[Key, int] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def longest(self, keys: SequenceOf[Key]) -> tuple[int, int | None]:
        """How many pages the longest snapshot of `keys` stands for, and its id."""
        for length in range(len(keys), 0, -1):
            if keys[length - 1] in self._by_key:
                self._by_key.move_to_end(keys[length - 1])
                return length, self._by_key[keys[length - 1]]
        return 0, None

    def points(self, keys: SequenceOf[Key]) -> list[int]:
        """After how many pages of a prompt of `keys` a snapshot is wanted, in order."""
        num_shared = 0
        while num_shared < len(keys) and keys[num_shared] in self._seen:
            num_shared += 1
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return sorted({num_shared, len(keys)} - {0})

    def reserve(self, key: Key) -> int | None:
        """An id for a snapshot that will be taken; None if there is one already, or no room."""
        if key in self._by_key or not (self._free or self._by_key):
            return None
        if not self._free:
            self._free.append(self._by_key.popitem(last=False)[1])
            self.num_evictions += 1
        return self._free.pop()

    def put(self, key: Key, snapshot: int) -> None:
        """Let a reserved snapshot be found from now on."""
        if key in self._by_key:  # two sequences came to it in one step
            self._free.append(snapshot)
        else:
            self._by_key[key] = snapshot

    def clear(self) -> None:
        """Give up every snapshot."""
        self._free += self._by_key.values()
        self._by_key.clear()
        self._seen.clear()
