"""Programs that are compiled at once: XLA lets other threads of Python run meanwhile."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def compile_all(functions: Sequence[Callable[[], T]]) -> Iterator[Callable[[], T]]:
    """For each function, in order, one that waits for what it returns or raises."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(function) for function in functions]:
            yield future.result
