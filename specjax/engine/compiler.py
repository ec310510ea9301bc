"""Compiles programs in threads: first those that requests wait for, then better shapes.

An XLA program for a CPU takes hundreds of memory maps, and Linux allows a process 65,530 by
default. Programs that no request waits for are compiled only while half of the maps are free.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

from specjax.host.memory import maps_in_use

log = logging.getLogger(__name__)

# Even on two cores four: XLA does parts of a program one after the other.
MAX_THREADS = min(max(4, os.cpu_count() or 1), 32)
FOR_SHAPES, FOR_ALL = 0.5, 0.9  # of the maps that a process may have


class Compiler:
    """Programs by key, compiled when they are asked for; `compile` makes one, in any thread.

    Attributes:
        ready: those that are compiled.
        failures: the exceptions of those that do not compile; tried again only if `ask` says so.
    """

    def __init__(self, compile: Callable[[Any], Any]):
        self.ready: dict[Any, Any] = {}
        self.failures: dict[Any, Exception] = {}
        self._compile = compile
        self._urgent: deque[Any] = deque()
        self._later: deque[Any] = deque()
        self._under_way: set[Any] = set()
        self._threads: set[threading.Thread] = set()
        self._changed = threading.Condition()
        self._seconds, self._began = 0.0, 0.0
        self._is_closed = self._is_full = False

    @property
    def num_asked(self) -> int:
        """How many programs are still to be compiled."""
        return len(self._urgent) + len(self._later) + len(self._under_way)

    @property
    def is_busy(self) -> bool:
        """Whether any program is still to be compiled."""
        return self.num_asked > 0

    @property
    def seconds(self) -> float:
        """Time during which at least one program was being compiled, in seconds."""
        now = time.perf_counter() if self._under_way else self._began
        return self._seconds + now - self._began

    def ask(
        self,
        keys: Iterable[Hashable],
        *,
        is_urgent: bool,
        num_threads: int = 1,
        retries: bool = False,
    ) -> None:
        """Queue keys that are not compiled yet, in their order, for `num_threads` threads.

        Those that failed before are queued again only if `retries`.
        """
        with self._changed:
            for key in dict.fromkeys(keys):
                if retries:
                    self.failures.pop(key, None)
                if key in self.ready or key in self.failures or key in self._under_way:
                    continue
                if key in self._urgent or (key in self._later and not is_urgent):
                    continue
                if is_urgent and key in self._later:
                    self._later.remove(key)
                (self._urgent if is_urgent else self._later).append(key)
            # What is urgent does not wait for a thread that has begun something else.
            num_busy = len(self._under_way)
            num_wanted = num_threads if is_urgent else num_threads - num_busy
            num_wanted = min(num_wanted, len(self._urgent) + len(self._later))
            for _ in range(num_wanted - (len(self._threads) - num_busy)):
                thread = threading.Thread(target=self._work, name="specjax-compiler")
                self._threads.add(thread)
                thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until another program has been compiled, or the time is over."""
        with self._changed:
            if self.is_busy:
                self._changed.wait(seconds)

    def wait_for(self, keys: Collection[Hashable], tell: Callable[[int], None]) -> None:
        """Wait for keys that were asked for; `tell` is called with the number that are ready.

        Raises:
            Exception: one of them does not compile.
        """
        while (num_there := sum(key in self.ready for key in keys)) < len(keys):
            if failed := [key for key in keys if key in self.failures]:
                raise self.failures[failed[0]]
            tell(num_there)
            self.wait(0.5)
        tell(num_there)

    def get(self, key: Hashable) -> Any:
        """A program; if it is not ready, it is compiled before all others.

        Raises:
            Exception: it does not compile.
        """
        program = self.ready.get(key)
        if program is None:
            self.ask([key], is_urgent=True, retries=True)
            self.wait_for([key], lambda num_there: None)
            program = self.ready[key]
        return program

    def close(self) -> None:
        """Wait for programs that are being compiled, then free all."""
        self._is_closed = True
        for thread in list(self._threads):
            thread.join()
        self.ready.clear()

    def _work(self) -> None:
        while (found := self._next()) is not None:
            (key,) = found
            try:
                program, error = self._compile(key), None
            except Exception as caught:  # others may compile
                program, error = None, caught
            with self._changed:
                self._under_way.discard(key)
                if not self._under_way:
                    self._seconds += time.perf_counter() - self._began
                if error is None:
                    self.ready[key] = program
                else:
                    self.failures[key] = error
                    log.warning("%s does not compile: %s", key, error)
                self._changed.notify_all()

    def _next(self) -> tuple[Any] | None:
        """The next key; None lets the thread end."""
        with self._changed:
            while queue := self._urgent or self._later:
                if self._is_closed or not threading.main_thread().is_alive():
                    break
                if self._has_room(queue):
                    if not self._under_way:
                        self._began = time.perf_counter()
                    self._under_way.add(key := queue.popleft())
                    return (key,)
            self._threads.discard(threading.current_thread())
            self._changed.notify_all()
            return None

    def _has_room(self, queue: deque[Any]) -> bool:
        """Whether the process may have more maps; if not, the queue is given up."""
        used = maps_in_use()
        if used < (FOR_ALL if queue is self._urgent else FOR_SHAPES):
            return True
        if queue is self._urgent:
            error = MemoryError(
                f"{used:.0%} of the memory maps that a process may have are in use, and another "
                "program needs hundreds; close LLMs that are not needed, or raise vm.max_map_count"
            )
            self.failures |= dict.fromkeys(queue, error)
        elif not self._is_full:
            self._is_full = True
            log.warning(
                "%.0f %% of this process's memory maps are in use: no more shapes are compiled, "
                "and smaller steps run padded in those there are; close LLMs that are not needed, "
                "or raise vm.max_map_count",
                100 * used,
            )
        queue.clear()
        return False
