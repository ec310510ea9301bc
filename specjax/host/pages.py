"""Allocates KV cache pages by reference counts, and finds pages by their contents."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class PageAllocator:
    """Counts the owners of each page. Pages are plain ints, not device arrays.

    A page can have a name that identifies its contents. A page without owners is free, but `find`
    still returns a named page until this page is allocated again. Free pages without a name are
    allocated first. Free pages with a name follow, the least recently released first.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.num_evictions = 0  # number of named pages that were allocated again
        self._free = OrderedDict.fromkeys(range(num_pages))  # in the order of allocation
        self._num_owners = [0] * num_pages
        self._names: dict[int, Hashable] = {}
        self._by_name: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """The number of pages without an owner."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` free pages with one owner each, or None if fewer are free."""
        if count > len(self._free):
            return None
        pages = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            if page in self._names:
                self._forget(page)
                self.num_evictions += 1
            self._num_owners[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one owner to each page."""
        for page in pages:
            self._free.pop(page, None)
            self._num_owners[page] += 1

    def release(self, pages: Iterable[int], *, forgets: bool = False) -> None:
        """Remove one owner from each page. A page without owners becomes free.

        `pages` must be in the order of their tokens. Of these pages, the last is allocated again
        first, because a page is useless without the pages before it. If `forgets` is true, pages
        that become free lose their names, so that `find` no longer returns them.
        """
        for page in reversed(list(pages)):
            assert self._num_owners[page] > 0
            self._num_owners[page] -= 1
            if not self._num_owners[page]:
                self._free[page] = None
                if forgets and page in self._names:
                    self._forget(page)
                if page not in self._names:  # without a name it is useless: allocate it first
                    self._free.move_to_end(page, last=False)

    def name(self, page: int, name: Hashable) -> None:
        """Give an owned page a name, unless it has a name or another page has this name."""
        assert self._num_owners[page] > 0
        if name not in self._by_name and page not in self._names:
            self._by_name[name] = page
            self._names[page] = name

    def find(self, name: Hashable) -> int | None:
        """Return the page with this name, or None if there is none."""
        return self._by_name.get(name)

    def forget_names(self) -> None:
        """Forget the names of all pages, for example when weights change."""
        self._names.clear()
        self._by_name.clear()

    def _forget(self, page: int) -> None:
        del self._by_name[self._names.pop(page)]
