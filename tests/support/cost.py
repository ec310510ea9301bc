"""Measures the cost of a call, independently of other load on the machine."""

import gc
import sys


def count_lines(function):
    """Return the number of lines of Python that a call executes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # a collection runs lines of its own: JAX's callbacks
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return count
