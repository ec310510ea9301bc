"""The process of one case: it imports the case's module, and prints its results."""

import importlib
import json
import logging
import sys
from typing import Any

from timing import Setting

MARK = "RESULT "  # see `run`


def main() -> None:
    """Run the case in the argument."""
    asked = json.loads(sys.argv[1])
    logging.getLogger("pallas_kernels").addHandler(_Told())
    module, _, name = asked["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    for row in function(Setting(is_cpu=asked["is_cpu"]), **asked["arguments"]):
        emit(row)


def emit(row: dict[str, Any]) -> None:
    """Print a result for `run`."""
    print(MARK + json.dumps(row, default=float), flush=True)


class _Told(logging.Handler):
    """A log handler that reports kernels' log lines: they say if a reference runs instead."""

    def emit(self, record: logging.LogRecord) -> None:
        emit({"what": "log", "message": record.getMessage()})


if __name__ == "__main__":
    main()
