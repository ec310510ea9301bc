"""Shows the progress of compiling as a bar, as log lines, or with a caller's function."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from specjax.engine.log import can_draw, get_log

_WATCHER: ContextVar[Callable[[int, int], None] | None] = ContextVar("watcher", default=None)


@contextmanager
def watch_compiling(tell: Callable[[int, int], None]) -> Iterator[None]:
    """Call `tell` instead of showing progress when an engine compiles in this `with` block.

    An engine calls `tell(num_ready, num_total)` about twice a second, in the thread that waits for
    the programs.
    """
    token = _WATCHER.set(tell)
    try:
        yield
    finally:
        _WATCHER.reset(token)


@contextmanager
def compile_progress(
    total: int, is_shown: bool, count_read: Callable[[], int]
) -> Iterator[Callable[[int], None]]:
    """Show the progress of compiling `total` programs.

    Yield a function, which the caller calls with the number of programs that are ready. Within
    `watch_compiling`, nothing is shown, and this function calls `tell`, even if `is_shown` is
    False.

    Args:
        count_read: function that returns how many of the programs were read from the cache. It is
            called when all programs are ready, but not within `watch_compiling`.
    """
    if (watcher := _WATCHER.get()) is not None:
        yield lambda num_done: watcher(num_done, total)
        return
    console, is_shown = Console(stderr=True), is_shown and total > 0
    is_drawn, start = is_shown and can_draw(console), time.perf_counter()
    log = get_log(verbose=is_shown)
    if not is_drawn:
        log.info("compiling %d programs, or reading them from the cache", total)
    columns = (
        TextColumn("compiling programs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not is_drawn, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda num_done: progress.update(task, completed=num_done)
    num_read = count_read()
    log.info(
        "%d programs in %.1f s: %d from the cache, %d compiled",
        *(total, time.perf_counter() - start, num_read, total - num_read),
    )
