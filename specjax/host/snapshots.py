"""Which prefixes have a snapshot of their recurrent states, within a budget.

A state costs as much memory as thousands of tokens of keys and values, so snapshots are few: at
the ends of prompts and at points of the chunk grid, never one per page.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from specjax.host.pages import PageAllocator


@dataclass(frozen=True)
class Snapshot:
    """The states after `length` tokens, and the pages that hold the keys and values of those."""

    id: int
    length: int
    pages: tuple[int, ...]


class SnapshotIndex:
    """Snapshots by the tokens they stand for, the least recently used given up for new ones.

    A snapshot holds a share of its pages, so it never outlives them. It stands for its tokens and
    the one that follows: a drafter's key and value at a position depend on the next token, so those
    in the last page are true for that continuation alone.
    """

    def __init__(self, num_snapshots: int, pages: PageAllocator, page_size: int):
        self._pages = pages
        self._page_size = page_size
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._by_tokens: OrderedDict[tuple[bytes, int], Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_tokens)

    def add(self, tokens: Sequence[int], length: int, pages: Sequence[int]) -> Snapshot | None:
        """Room for the states after the first `length` of `tokens`, whose page table is `pages`.

        None if there is one already, or no room at all. The caller fills it in before any step that
        could restore it.

        Raises:
            ValueError: `length` is not a whole number of pages, or no token follows.
        """
        if length % self._page_size or not 0 < length < len(tokens):
            raise ValueError(
                f"length={length} must be a positive multiple of page_size={self._page_size} below "
                f"the {len(tokens)} tokens: pages are shared whole, and drafters look one ahead"
            )
        key = self._keys(tokens[: length + 1])[-1]
        if key in self._by_tokens or not (self._free or self._by_tokens):
            return None
        if not self._free:
            self._drop_oldest()
        held = tuple(pages[: length // self._page_size])
        self._pages.share(held)
        snapshot = self._by_tokens[key] = Snapshot(self._free.pop(), length, held)
        return snapshot

    def find(self, tokens: Sequence[int]) -> Snapshot | None:
        """The longest snapshot that a prompt may go on from, with at least a token left to run."""
        for key in reversed(self._keys(tokens)):
            if key in self._by_tokens:
                self._by_tokens.move_to_end(key)
                return self._by_tokens[key]
        return None

    def drop_all(self) -> None:
        """Forget every snapshot, as when weights change."""
        while self._by_tokens:
            self._drop_oldest()

    def _keys(self, tokens: Sequence[int]) -> list[tuple[bytes, int]]:
        """A digest of the tokens up to each page's end, and the token that follows."""
        keys, digest = [], b""
        for end in range(self._page_size, len(tokens), self._page_size):
            page = array("q", tokens[end - self._page_size : end])
            digest = blake2b(digest + page.tobytes(), digest_size=16).digest()
            keys.append((digest, tokens[end]))
        return keys

    def _drop_oldest(self) -> None:
        _, snapshot = self._by_tokens.popitem(last=False)
        self._pages.release(snapshot.pages)
        self._free.append(snapshot.id)
