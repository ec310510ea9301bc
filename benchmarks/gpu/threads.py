"""Concurrent compilation: XLA lets other Python threads run meanwhile."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def compile_all(functions: Sequence[Callable[[], T]]) -> Iterator[Callable[[], T]]:
    """Yield, for each function in order, a function that waits for its result or exception."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(function) for function in functions]:
            yield future.result
