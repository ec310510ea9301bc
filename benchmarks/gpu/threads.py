"""Compiles programs concurrently. While XLA compiles, other Python threads can run."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def compile_all(functions: Sequence[Callable[[], T]]) -> Iterator[Callable[[], T]]:
    """Run `functions` in threads. Yield, in the same order, functions that return their results.

    A yielded function waits for the result, and raises the exception if there was one.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(function) for function in functions]:
            yield future.result
