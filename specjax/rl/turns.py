"""Whose turn it is to touch an engine."""

import threading
from collections.abc import Callable


class Turns:
    """A lock that a loop cannot keep to itself by taking it again at once.

    Who waits for it holds the gate, before which the loop has to wait then.
    """

    def __init__(self):
        self._gate, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._ended = threading.Condition()
        self._num_ended = 0

    def __enter__(self) -> None:
        with self._gate:
            self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._release()
        with self._ended:
            self._num_ended += 1
            self._ended.notify_all()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn, which it cannot take twice."""
        return self._owner == threading.get_ident()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Within one's own turn, let others have theirs until something is so."""
        while not is_so():
            num_ended = self._num_ended  # of a turn that ends at this moment, again: no harm
            self._release()
            try:
                with self._ended:
                    self._ended.wait_for(lambda seen=num_ended: self._num_ended != seen)
            finally:
                self.__enter__()

    def _release(self) -> None:
        self._owner = None
        self._lock.release()
