"""Progress of compiling: a bar, or lines of the log without a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def compile_progress(
    total: int, is_shown: bool, count_read: Callable[[], int]
) -> Iterator[Callable[[int], None]]:
    """Show progress of compiling `total` programs; yields a function of the number of ready ones.

    Args:
        count_read: how many of them were read from the cache; called when all are ready.
    """
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
