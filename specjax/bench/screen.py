"""Shows the progress of `specjax bench`: on a terminal as a growing table, elsewhere as lines."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import Logger
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specjax.bench.report import Figures, TextTable, rich_table
from specjax.engine.log import can_draw, get_log

LINE_SECONDS = 10.0  # between two lines about the same work


class Screen:
    """Shows the current work and the measured rows of a table. This base class shows nothing."""

    def begin(self, work: str) -> None:
        """Show that `work` begins, such as loading or measuring a configuration."""

    def progress(self, num_done: int, total: int) -> None:
        """Report that `num_done` of `total` units of the current work are done.

        If `total` changes, the next part of the work has begun. A progress bar shows the sum of
        all parts.
        """

    def preview(self, figures: Sequence[Figures]) -> None:
        """Show the rows of configurations that are being measured."""

    def show(self, figures: Sequence[Figures]) -> None:
        """Show the rows of configurations whose measurement has ended."""

    def end(self, lines: Sequence[str]) -> None:
        """Show the lines below the table, when no work is left."""


class Lines(Screen):
    """Prints rows as lines to `stream`, if it is not None. Reports the current work to `log`."""

    def __init__(self, names: Sequence[str], stream: TextIO | None, log: Logger):
        """`names` are the names of all rows that will be shown."""
        self._table, self._stream, self._log = TextTable(names), stream, log
        self._work, self._told, self._has_header = "", 0.0, False

    def begin(self, work: str) -> None:
        """See `Screen`."""
        self._work, self._told = work, time.monotonic()
        self._log.info("%s", work)

    def progress(self, num_done: int, total: int) -> None:
        """See `Screen`."""
        if (now := time.monotonic()) - self._told >= LINE_SECONDS:
            self._told = now
            self._log.info("%s: %d of %d", self._work, num_done, total)

    def show(self, figures: Sequence[Figures]) -> None:
        """See `Screen`."""
        if not self._has_header:
            self._print(self._table.header)
        self._has_header = True
        for one in figures:
            self._print(self._table.line(one))

    def end(self, lines: Sequence[str]) -> None:
        """See `Screen`."""
        for line in ("", *lines) if self._has_header else lines:
            self._print(line)

    def _print(self, line: str) -> None:
        if self._stream is not None:
            print(line, file=self._stream, flush=True)


class Terminal(Screen):
    """Draws the table so far, and below it a bar for the current work.

    The screen is drawn only during calls of its methods, because a drawing thread would disturb the
    measurement.
    """

    def __init__(self, live: Live):
        self._live = live
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            auto_refresh=False,
        )
        self._task, self._before, self._done, self._total = None, 0, 0, 0
        self._final: list[Figures] = []
        self._preview: Sequence[Figures] = ()

    def begin(self, work: str) -> None:
        """See `Screen`."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(work, total=None)
        self._before = self._done = self._total = 0
        self._draw()

    def progress(self, num_done: int, total: int) -> None:
        """See `Screen`."""
        if total != self._total or num_done < self._done:
            self._before += self._total
        self._done, self._total = num_done, total
        if self._task is not None:
            done, whole = self._before + num_done, self._before + total
            self._bar.update(self._task, completed=done, total=whole)
        self._draw()

    def preview(self, figures: Sequence[Figures]) -> None:
        """See `Screen`."""
        self._preview = figures
        self._draw()

    def show(self, figures: Sequence[Figures]) -> None:
        """See `Screen`."""
        self._final, self._preview = [*self._final, *figures], ()
        self._draw()

    def end(self, lines: Sequence[str]) -> None:
        """See `Screen`."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = None
        self._draw()
        self._live.stop()
        for line in lines:
            self._live.console.print(line, highlight=False, markup=False)

    def _draw(self) -> None:
        rows = [*self._final, *self._preview]
        parts = ([rich_table(rows)] if rows else []) + (
            [self._bar] if self._task is not None else []
        )
        self._live.update(Group(*parts), refresh=True)


@contextmanager
def open_screen(names: Sequence[str], stream: TextIO, *, has_table: bool) -> Iterator[Screen]:
    """Yield a `Terminal` if `stream` is a terminal that can be drawn on, else `Lines`.

    Args:
        names: names of all rows that will be shown.
        has_table: whether to show the table. If False, the screen is a `Lines` that only logs the
            current work.
    """
    console = Console(file=stream)
    if not has_table or not can_draw(console):
        yield Lines(names, stream if has_table else None, get_log(verbose=True))
        return
    with Live(console=console, auto_refresh=False) as live:
        yield Terminal(live)
