"""A fair lock for the threads that use an engine."""

import os
import threading
from collections.abc import Callable

from specjax.engine.process import refuse_fork


class Turns:
    """A fair lock: no thread can take the lock twice in a row while another thread waits for it.

    The gate is a second lock. A thread must acquire the gate before it acquires the lock. While a
    thread waits for the lock, it holds the gate, so that no other thread can overtake it.
    """

    def __init__(self):
        self._gate, self._lock = threading.Lock(), threading.Lock()
        self._pid = os.getpid()
        self._owner: int | None = None
        self._ended = threading.Condition()
        self._num_ended = 0

    def __enter__(self) -> None:
        refuse_fork(self._pid)
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
        """Whether this thread holds the lock. The lock is not reentrant."""
        return self._owner == threading.get_ident()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Release the held lock to other threads until `is_so` returns true; then reacquire it."""
        while not is_so():
            num_ended = self._num_ended  # if a turn ends now, `is_so` is checked again
            self._release()
            try:
                with self._ended:
                    self._ended.wait_for(lambda seen=num_ended: self._num_ended != seen)
            finally:
                self.__enter__()

    def _release(self) -> None:
        self._owner = None
        self._lock.release()
