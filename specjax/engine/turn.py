"""A lock with which several threads take turns on the host."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CALLER = -1  # the owner of the first turn


class Turn:
    """A lock that a thread holds under a number, its owner. At first, `CALLER` holds the lock.

    An owner that holds the lock may take it again, and an owner that does not hold the lock may
    give it back. Both do nothing. So after Ctrl-C, an owner can simply take the lock again.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._owner: int | None = CALLER

    def take(self, owner: int) -> None:
        """Wait until no other owner has the turn, and take it."""
        with self._changed:
            self._changed.wait_for(lambda: self._owner in (None, owner))
            self._owner = owner

    def give(self, owner: int) -> bool:
        """Give the turn back if `owner` has it, and return whether it had the turn."""
        with self._changed:
            if self._owner != owner:
                return False
            self._owner = None
            self._changed.notify_all()
            return True

    @contextmanager
    def given(self, owner: int) -> Iterator[None]:
        """Give the turn back while the block runs, if `owner` has it, and then take it again."""
        had_it = self.give(owner)
        try:
            yield
        finally:
            if had_it:
                self.take(owner)

    def await_others(self, condition: Callable[[], bool]) -> None:
        """Let other owners take turns until `condition` holds. Then take the turn as `CALLER`."""
        self.give(CALLER)
        try:
            with self._changed:
                self._changed.wait_for(condition)
        finally:
            self.take(CALLER)
