"""Progress in the log: the logger "specjax" of Python's logging.

If the program has configured logging, that decides where lines go. Otherwise they go to stderr, so
that a first script, or a job without a terminal, is not silent for minutes.
"""

import importlib.util
import logging

from rich.console import Console

_LOGGER = logging.getLogger("specjax")
_LOGGER.addHandler(logging.NullHandler())
_SILENT = logging.Logger("specjax.silent", logging.CRITICAL + 1)


def get_log(*, verbose: bool) -> logging.Logger:
    """The logger of an LLM; silent unless `verbose`."""
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


def can_draw(console: Console) -> bool:
    """Whether stderr is a terminal, or a notebook, on which a bar can be redrawn."""
    if console.is_jupyter:  # where rich draws by widgets
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal
