"""Who owns which page of the key-value pool, and what the pages without an owner still hold."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class PageAllocator:
    """Counts each page's owners. Pages are plain ints; device arrays never reach this file.

    A page whose contents have a name keeps it when its last owner lets go, and may be found by it
    until the page is needed for something else: after those without a name, and of those with one,
    those let go first are taken first.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.num_evictions = 0  # named pages that were taken for something else
        self._free = OrderedDict.fromkeys(range(num_pages))  # in the order they are taken in
        self._num_owners = [0] * num_pages
        self._names: dict[int, Hashable] = {}
        self._by_name: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, or None if fewer are free."""
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
        """Become one more owner of each page."""
        for page in pages:
            self._free.pop(page, None)
            self._num_owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Stop owning each page; those without an owner are free again.

        Of pages that hold a sequence in order, the last are to be taken first, since a page is of
        no use without those before it.
        """
        for page in reversed(list(pages)):
            assert self._num_owners[page] > 0
            self._num_owners[page] -= 1
            if not self._num_owners[page]:
                self._free[page] = None
                if page not in self._names:  # nothing is lost with it, so it is taken before others
                    self._free.move_to_end(page, last=False)

    def name(self, page: int, name: Hashable) -> None:
        """Let an owned page be found by what it holds, unless another page holds the same."""
        assert self._num_owners[page] > 0
        if name not in self._by_name and page not in self._names:
            self._by_name[name] = page
            self._names[page] = name

    def find(self, name: Hashable) -> int | None:
        """The page that holds what is called `name`."""
        return self._by_name.get(name)

    def forget_names(self) -> None:
        """Let no page be found, as when weights change."""
        self._names.clear()
        self._by_name.clear()

    def _forget(self, page: int) -> None:
        del self._by_name[self._names.pop(page)]
