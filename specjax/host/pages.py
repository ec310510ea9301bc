"""Who owns which page of the key-value pool."""

from collections.abc import Iterable


class PageAllocator:
    """Counts each page's owners. Pages are plain ints; device arrays never reach this file."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, or None if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Become one more owner of each page."""
        for page in pages:
            self._num_owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Stop owning each page; those without an owner are free again."""
        for page in pages:
            assert self._num_owners[page] > 0
            self._num_owners[page] -= 1
            if not self._num_owners[page]:
                self._free.append(page)
