"""Compiles programs in threads.

A program is urgent if requests wait for it. All other programs only make later steps faster, for
example because their shapes need less padding. The other programs are compiled in threads of the
lowest priority, so that they slow down neither serving nor urgent programs. These threads have
normal priority only if a caller waits until all programs are ready. XLA does part of the work in
its own threads, which always have normal priority. For programs that are not urgent, options
restrict XLA to one of its threads at a time (`xla_options.OPTIONS_BEHIND`).

An XLA program for a CPU takes hundreds of memory maps, and Linux allows a process 65,530 by
default. Programs that are not urgent are compiled only while at least 35 % of the maps are free.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from specjax.host.leaving import COMPILER, is_leaving, wait_for, watch_exit
from specjax.host.memory import maps_in_use

log = logging.getLogger(__name__)

# At least four threads, even on two cores, because XLA compiles parts of a program serially.
MAX_THREADS = min(max(4, os.cpu_count() or 1), 32)
FOR_SHAPES, FOR_ALL = 0.65, 0.9  # fractions of the memory maps that a process may have
NICENESS = 19  # the lowest priority, for threads whose programs no request waits for


@dataclass
class _Line:
    """A queue with the keys of programs to compile, and the threads that compile them."""

    keys: deque[Any] = field(default_factory=deque)
    threads: set[threading.Thread] = field(default_factory=set)
    num_busy: int = 0  # number of threads that are compiling


class Compiler:
    """Compiles programs in threads, and keeps them. `ask` takes the keys of the programs.

    `compile(key, is_urgent)` must return the program of a key, and is called in any thread.
    `is_urgent` means that requests wait for the program. Other programs are compiled only while the
    process uses less than the fraction `maps_for_shapes` of its allowed memory maps.

    Attributes:
        ready: the compiled programs, by key.
        failures: exceptions of programs that failed to compile, by key. `ask` tries these programs
            again only with `retries`.
    """

    def __init__(self, compile: Callable[[Any, bool], Any], maps_for_shapes: float = FOR_SHAPES):
        self.ready: dict[Any, Any] = {}
        self.failures: dict[Any, Exception] = {}
        self._compile, self._maps_for_shapes = compile, maps_for_shapes
        self._urgent, self._later = _Line(), _Line()
        self._under_way: set[Any] = set()
        self._changed = threading.Condition()
        self._seconds, self._began = 0.0, 0.0
        self._is_closed = self._is_full = False

    @property
    def num_asked(self) -> int:
        """The number of programs still to be compiled."""
        return len(self._urgent.keys) + len(self._later.keys) + len(self._under_way)

    @property
    def is_busy(self) -> bool:
        """Whether any program is still to be compiled."""
        return self.num_asked > 0

    @property
    def seconds(self) -> float:
        """The seconds during which at least one program was being compiled."""
        now = time.perf_counter() if self._under_way else self._began
        return self._seconds + now - self._began

    def ask(
        self,
        keys: Iterable[Hashable],
        *,
        is_urgent: bool,
        num_threads: int = 1,
        retries: bool = False,
        is_awaited: bool = False,
    ) -> None:
        """Queue the keys whose programs are not compiled yet, in order.

        Up to `num_threads` threads compile the programs. If a program has failed to compile before,
        its key is queued again only if `retries`. New threads have the lowest priority, unless
        `is_urgent` (requests wait for the programs) or `is_awaited` (a caller waits for all
        programs).
        """
        niceness = 0 if is_urgent or is_awaited else NICENESS
        line, urgent, later = self._later, self._urgent.keys, self._later.keys
        with self._changed:
            for key in dict.fromkeys(keys):
                if retries:
                    self.failures.pop(key, None)
                if key in self.ready or key in self.failures or key in self._under_way:
                    continue
                if key in urgent or (key in later and not is_urgent):
                    continue
                if is_urgent and key in later:
                    later.remove(key)
                (urgent if is_urgent else later).append(key)
            num_wanted = num_threads - self._later.num_busy
            if is_urgent:  # urgent keys do not wait for threads that are busy
                line, num_wanted = self._urgent, num_threads
            watch_exit(log.warning)
            num_idle = len(line.threads) - line.num_busy
            for _ in range(min(num_wanted, len(line.keys)) - num_idle):
                thread = threading.Thread(target=self._work, args=[line, niceness], name=COMPILER)
                line.threads.add(thread)
                thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until another program is compiled or the time is over.

        Return at once if no program is still to be compiled.
        """
        with self._changed:
            if self.is_busy:
                self._changed.wait(seconds)

    def wait_for(self, keys: Collection[Hashable], tell: Callable[[int], None]) -> None:
        """Wait until the programs of `keys` are ready. Pass the number of ready programs to `tell`.

        The keys must have been passed to `ask` as urgent. After a KeyboardInterrupt, programs that
        no thread has begun to compile are removed from the queue.

        Raises:
            Exception: a program failed to compile.
        """
        try:
            while (num_there := sum(key in self.ready for key in keys)) < len(keys):
                if failed := [key for key in keys if key in self.failures]:
                    raise self.failures[failed[0]]
                tell(num_there)
                self.wait(0.5)
        except KeyboardInterrupt:
            with self._changed:
                for key in set(keys) & set(self._urgent.keys):
                    self._urgent.keys.remove(key)
            raise
        tell(num_there)

    def get(self, key: Hashable) -> Any:
        """Return the program of a key. If the program is not ready, compile it as urgent.

        Raises:
            Exception: the program failed to compile.
        """
        program = self.ready.get(key)
        if program is None:
            self.ask([key], is_urgent=True, retries=True)
            self.wait_for([key], lambda num_there: None)
            program = self.ready[key]
        return program

    def close(self) -> None:
        """Wait for programs that are being compiled, then free all programs.

        If the process is ending, do not wait.
        """
        self._is_closed = True
        if not is_leaving():
            wait_for([*self._urgent.threads, *self._later.threads], log.warning)
        self.ready.clear()

    def _work(self, line: _Line, niceness: int) -> None:
        if niceness and sys.platform == "linux":  # elsewhere, all threads share one priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        while (found := self._next(line)) is not None:
            (key,) = found
            try:
                program, error = self._compile(key, line is self._urgent), None
            except Exception as caught:  # other programs may compile
                program, error = None, caught
            with self._changed:
                self._under_way.discard(key)
                line.num_busy -= 1
                if not self._under_way:
                    self._seconds += time.perf_counter() - self._began
                if error is None:
                    self.ready[key] = program
                else:
                    self.failures[key] = error
                    log.warning("%s does not compile: %s", key, error)
                self._changed.notify_all()

    def _next(self, line: _Line) -> tuple[Any] | None:
        """Take the next key from the queue `line`. Return (key,), or None to end the thread."""
        with self._changed:
            while line.keys:
                if self._is_closed or is_leaving():
                    break
                if self._has_room(line):
                    if not self._under_way:
                        self._began = time.perf_counter()
                    self._under_way.add(key := line.keys.popleft())
                    line.num_busy += 1
                    return (key,)
            line.threads.discard(threading.current_thread())
            self._changed.notify_all()
            return None

    def _has_room(self, line: _Line) -> bool:
        """Return whether enough memory maps are free to compile. If not, empty the queue `line`.

        The programs of the urgent queue then fail with a MemoryError.
        """
        used = maps_in_use()
        if used < (FOR_ALL if line is self._urgent else self._maps_for_shapes):
            return True
        if line is self._urgent:
            error = MemoryError(
                f"{used:.0%} of the memory maps that a process may have are in use, and another "
                "program needs hundreds; close LLMs that are not needed, or raise vm.max_map_count"
            )
            self.failures |= dict.fromkeys(line.keys, error)
        elif not self._is_full:
            self._is_full = True
            log.warning(
                "%.0f %% of this process's memory maps are in use: no more shapes are compiled, "
                "and smaller steps run padded in existing shapes; close LLMs that are not needed, "
                "or raise vm.max_map_count",
                100 * used,
            )
        line.keys.clear()
        return False
