"""Shows the progress of a measurement: on a terminal as a bar, elsewhere as log lines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specjax.engine.log import Pace, can_draw, get_log


@contextmanager
def stages(
    total: int, *, show_progress: bool, work: str = "measuring"
) -> Iterator[Callable[[str], None]]:
    """Show on stderr which of `total` runs begins. `work` says what a run does, like "measuring".

    Yield a function that must be called with the name of each run when it begins.
    """
    console, pace, num_begun = Console(stderr=True), Pace(), 0
    is_drawn = show_progress and can_draw(console)
    log = get_log(verbose=show_progress and not is_drawn)
    columns = (
        TextColumn(work),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, disable=not is_drawn, transient=True) as progress:
        task = progress.add_task("", total=total)

        def begin(name: str) -> None:
            nonlocal num_begun
            progress.update(task, completed=num_begun, description=name)
            num_begun += 1
            if pace.is_due() or num_begun in (1, total):
                log.info("%s %s, run %d of %d", work, name, num_begun, total)

        yield begin
