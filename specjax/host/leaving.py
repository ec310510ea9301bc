"""Ends a process whose threads may still be compiling programs.

XLA cannot be interrupted, and Python waits for all threads before it exits. So the process waits
for the threads that compile, and tells the user why.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable

COMPILER = "specjax-compiler"  # name of the threads that compile
INTERRUPTED = 130  # exit code of a process that Ctrl-C ended
PATIENCE = 1.0  # seconds to wait before a message

_is_leaving = threading.Event()


def is_leaving() -> bool:
    """Return whether the process is ending, so that threads must not begin new work."""
    return _is_leaving.is_set() or not threading.main_thread().is_alive()


def wait_for(threads: Iterable[threading.Thread], tell: Callable[[str], None]) -> None:
    """Wait until `threads`, which compile programs, have ended.

    After `PATIENCE` seconds, call `tell` with the reason for the wait.
    """
    threads, end = list(threads), time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if number := sum(thread.is_alive() for thread in threads):
        tell(
            f"waiting for {_programs(number)} that XLA is compiling and cannot stop; Ctrl-C ends "
            "this at once"
        )
    for thread in threads:
        thread.join()


def watch_exit(tell: Callable[[str], None]) -> None:
    """Start a thread that calls `tell` if threads still compile when the process ends.

    While the process then waits for these threads, Ctrl-C ends it at once.
    """
    if all(thread.name != _watch.__name__ for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=[tell], name=_watch.__name__, daemon=True).start()
        atexit.register(_leave_compilers)


def leave_interrupted(tell: Callable[[str], None], *, is_second: bool) -> None:
    """Wait after an interrupt (Ctrl-C) until no thread compiles programs.

    If the user interrupts again during the wait, the process ends at once. It also ends at once if
    this is already the second interrupt (`is_second`). `tell` is called as in `wait_for`.
    """
    _is_leaving.set()
    try:
        if is_second:
            raise KeyboardInterrupt
        wait_for(_compilers(), tell)
    except KeyboardInterrupt:
        end_now()
    finally:
        _is_leaving.clear()


def _leave_compilers() -> None:
    """End the process at once if threads still compile.

    This function runs when Python exits. Threads can then still compile only if Ctrl-C interrupted
    Python's wait for them. Python would kill them inside XLA, which aborts the process.
    """
    if _compilers():
        end_now()


def leave(close: Callable[[], None], tell: Callable[[str], None]) -> None:
    """Call `close`. If threads still compile then, end the process at once with exit code 0.

    While `close` runs, `is_leaving` returns True, and `close` need not wait for these threads.
    Before the process ends, `tell` is called with a message.
    """
    _is_leaving.set()
    try:
        close()
        if number := len(_compilers()):
            tell(f"ended without waiting for {_programs(number)} that XLA is compiling")
            end_now(0)
    finally:
        _is_leaving.clear()


def end_now(code: int = INTERRUPTED) -> None:
    """End the process at once, without waiting for threads."""
    for stream in sys.stdout, sys.stderr:
        stream.flush()
    os._exit(code)


def _programs(number: int) -> str:
    return "1 program" if number == 1 else f"{number} programs"


def _watch(tell: Callable[[str], None]) -> None:
    threading.main_thread().join()
    wait_for(_compilers(), tell)


def _compilers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == COMPILER]
