"""Who owns which page of the key-value pool."""


class PageAllocator:
    """Owns the free list. Pages are plain ints; device arrays never reach this file."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, or None if fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Give pages back."""
        self._free.extend(pages)
