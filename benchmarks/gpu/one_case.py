"""Runs one case: imports the case's module, calls its function, and prints the results."""

import importlib
import json
import logging
import sys
from typing import Any

from timing import Setting

MARK = "RESULT "  # as in `run`


def main() -> None:
    """Run the case that the argument describes as JSON."""
    asked = json.loads(sys.argv[1])
    logging.getLogger("pallas_kernels").addHandler(_Told())
    module, _, name = asked["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    for row in function(Setting(is_cpu=asked["is_cpu"]), **asked["arguments"]):
        emit(row)


def emit(row: dict[str, Any]) -> None:
    """Print a result in the form that `run` reads."""
    print(MARK + json.dumps(row, default=float), flush=True)


class _Told(logging.Handler):
    """A log handler that prints log lines of the kernels as results.

    A line tells, for example, that the reference runs instead of a kernel.
    """

    def emit(self, record: logging.LogRecord) -> None:
        emit({"what": "log", "message": record.getMessage()})


if __name__ == "__main__":
    main()
