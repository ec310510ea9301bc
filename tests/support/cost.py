"""What a call costs, whatever else the machine does."""

import gc
import sys


def count_lines(function):
    """Lines of Python that a call runs."""
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
