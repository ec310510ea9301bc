"""Shows the progress of a call of `generate` as a bar, with a class like tqdm, or as log lines."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import Logger
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specjax.engine.log import LINE_SECONDS, can_draw, get_log
from specjax.engine.metrics import Metrics
from specjax.host.sequence import Sequence as Sample

BAR_SECONDS = 0.2  # between two updates


@dataclass(frozen=True)
class CallProgress:
    """The progress of a call of `generate`."""

    num_finished: int
    num_tokens: int
    seconds: float
    acceptance_length: float | None  # mean over rounds with drafts; None before the first of them
    num_running: int
    num_waiting: int
    num_compiling: int  # number of programs being compiled

    @property
    def speed(self) -> str:
        """A text with the tokens per second, and the acceptance length of rounds with drafts."""
        per_round = self.acceptance_length
        shown = f"{self.num_tokens / max(self.seconds, 1e-9):,.0f} tokens/s"
        return shown if per_round is None else f"{shown}, acceptance length {per_round:.2f}"

    @property
    def load(self) -> str:
        """A text with the numbers of running and waiting requests, and of programs to compile."""
        shown = f"{self.num_running} running, {self.num_waiting} waiting"
        return shown + f", compiling {self.num_compiling}" * (self.num_compiling > 0)


Show = Callable[[CallProgress], None]


@contextmanager
def progress(
    samples: Sequence[Sample],
    read_metrics: Callable[[], Metrics],
    use_tqdm: bool | Callable[..., Any],
    *,
    verbose: bool,
    draws: bool = True,
) -> Iterator[Callable[[], None]]:
    """Show how `samples` grow. The `with` block must call the yielded function after every step.

    Args:
        use_tqdm: whether to show progress, or a class with the arguments of tqdm.
        verbose: the LLM's option `verbose`. If it is False, progress is shown only if `use_tqdm` is
            a class.
        draws: whether to show a bar instead of log lines if there is a terminal.
    """
    if callable(use_tqdm):
        view, pause = _called(use_tqdm, len(samples)), BAR_SECONDS
    elif not use_tqdm or not verbose:
        yield lambda: None
        return
    elif draws and can_draw(console := Console(stderr=True)):
        view, pause = _bar(console, len(samples)), BAR_SECONDS
    else:
        view, pause = _lines(get_log(verbose=True), len(samples)), LINE_SECONDS
    before, start = read_metrics(), time.monotonic()
    due = start + pause

    def look(now: float) -> CallProgress:
        metrics = read_metrics()
        rounds = metrics.num_drafts - before.num_drafts
        accepted = metrics.num_accepted_tokens - before.num_accepted_tokens
        return CallProgress(
            num_finished=sum(sample.is_finished for sample in samples),
            num_tokens=sum(sample.num_output for sample in samples),
            seconds=now - start,
            acceptance_length=1 + accepted / rounds if rounds else None,
            num_running=metrics.num_requests_running,
            num_waiting=metrics.num_requests_waiting,
            num_compiling=metrics.num_compiling,
        )

    with view as show:

        def tick() -> None:
            nonlocal due
            if (now := time.monotonic()) >= due:
                due = now + pause
                show(look(now))

        yield tick
        show(look(time.monotonic()))


@contextmanager
def _called(make: Callable[..., Any], total: int) -> Iterator[Show]:
    bar = make(total=total, desc="generating", unit="sample")
    num_shown = 0

    def show(figures: CallProgress) -> None:
        nonlocal num_shown
        bar.postfix = f"{figures.speed}, {figures.load}"
        bar.update(figures.num_finished - num_shown)
        num_shown = figures.num_finished

    try:
        yield show
    finally:
        bar.close()


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Show]:
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, refresh_per_second=5, transient=True) as bar:
        task = bar.add_task("", total=total)

        def show(figures: CallProgress) -> None:
            text = f"{figures.speed}, {figures.load}"
            bar.update(task, completed=figures.num_finished, description=text)

        yield show


@contextmanager
def _lines(log: Logger, total: int) -> Iterator[Show]:
    def show(figures: CallProgress) -> None:
        load = f", {figures.load}" if figures.num_finished < total else ""
        log.info(
            "generated %d tokens in %.1f s, %d/%d finished: %s%s",
            *(figures.num_tokens, figures.seconds, figures.num_finished, total),
            *(figures.speed, load),
        )

    yield show
