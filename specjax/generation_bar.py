"""What shows how far a call has come: a bar of our own, or one like tqdm's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Show = Callable[[int, int], None]  # numbers of finished samples and of tokens, so far


@contextmanager
def generation_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Show]:
    """A bar of `total` samples; `use_tqdm` may be a class that is called as tqdm's is."""
    with _called(use_tqdm, total) if callable(use_tqdm) else _own(total, use_tqdm) as show:
        yield show


@contextmanager
def _called(make: Callable[..., Any], total: int) -> Iterator[Show]:
    bar = make(total=total, desc="generating", unit="sample")
    num_shown = 0

    def show(num_finished: int, num_tokens: int) -> None:
        nonlocal num_shown
        bar.update(num_finished - num_shown)
        num_shown = num_finished

    try:
        yield show
    finally:
        bar.close()


@contextmanager
def _own(total: int, is_shown: bool) -> Iterator[Show]:
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
    )
    with Progress(*columns, disable=not is_shown, transient=True) as progress:
        task = progress.add_task("", total=total, rate=0.0)

        def show(num_finished: int, num_tokens: int) -> None:
            rate = num_tokens / (progress.tasks[task].elapsed or 1e-9)
            progress.update(task, completed=num_finished, rate=rate)

        yield show
