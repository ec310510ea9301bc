"""A lock with which several threads take turns on the host."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CALLER = -1  # the owner of the first turn


class Turn:
    """A lock that is held by an owner, which is a number and not a thread.

    At first, `CALLER` holds the lock. An owner may take the lock again, or give a lock that it does
    not hold; both do nothing. So after Ctrl-C, an owner can simply take the lock again.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._owner: int | None = CALLER

    def take(self, owner: int) -> None:
        """Take the lock for `owner`. If another owner holds the lock, wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._owner in (None, owner))
            self._owner = owner

    def give(self, owner: int) -> bool:
        """Release the lock if `owner` holds it. Return whether `owner` held the lock."""
        with self._changed:
            if self._owner != owner:
                return False
            self._owner = None
            self._changed.notify_all()
            return True

    @contextmanager
    def given(self, owner: int) -> Iterator[None]:
        """Release the lock of `owner` while the `with` block runs, and then take it again.

        If `owner` does not hold the lock, do nothing.
        """
        had_it = self.give(owner)
        try:
            yield
        finally:
            if had_it:
                self.take(owner)

    def await_others(self, condition: Callable[[], bool]) -> None:
        """Release the lock of `CALLER` until `condition()` is true, and then take it again."""
        self.give(CALLER)
        try:
            with self._changed:
                self._changed.wait_for(condition)
        finally:
            self.take(CALLER)
