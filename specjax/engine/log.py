"""Provides the logger "specjax", which reports progress through Python's logging.

If the user's program has configured logging, its handlers decide where lines go. Otherwise lines go
to stderr, so that a script is not silent for minutes.
"""

import importlib.util
import logging
import time

from rich.console import Console

LINE_SECONDS = 10.0  # between two lines about the same work
_LOGGER = logging.getLogger("specjax")
_LOGGER.addHandler(logging.NullHandler())
_SILENT = logging.Logger("specjax.silent", logging.CRITICAL + 1)


def get_log(*, verbose: bool) -> logging.Logger:
    """Return the logger "specjax" if `verbose`, else a logger that is silent."""
    if not verbose:
        return _SILENT
    is_configured = logging.root.handlers or _LOGGER.level or len(_LOGGER.handlers) > 1
    if not is_configured:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
        # If logging is configured later, lines must not appear twice.
        handler.addFilter(lambda _: not logging.root.handlers)
        _LOGGER.addHandler(handler)
        _LOGGER.setLevel(logging.INFO)
    return _LOGGER


class Pace:
    """Limits log lines about frequent events to one line per LINE_SECONDS."""

    def __init__(self):
        self._due = time.monotonic() + LINE_SECONDS

    def is_due(self) -> bool:
        """Return whether a line is due. If so, the next line is due after LINE_SECONDS."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + LINE_SECONDS
        return True


def can_draw(console: Console) -> bool:
    """Return whether the console, a terminal or a notebook, can redraw a bar."""
    if console.is_jupyter:  # there rich draws with widgets
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal
