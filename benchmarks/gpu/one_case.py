"""The process of one case: imports its module, and prints what it yields."""

import importlib
import json
import logging
import sys
from typing import Any

from timing import Setting

MARK = "RESULT "  # see `run`


def main() -> None:
    """Run the case that the argument describes."""
    asked = json.loads(sys.argv[1])
    logging.getLogger("pallas_kernels").addHandler(_Told())
    module, _, name = asked["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    for row in function(Setting(is_cpu=asked["is_cpu"]), **asked["arguments"]):
        emit(row)


def emit(row: dict[str, Any]) -> None:
    """Hand a result over."""
    print(MARK + json.dumps(row, default=float), flush=True)


class _Told(logging.Handler):
    """Results, too, are what kernels log: that a reference runs in their place."""

    def emit(self, record: logging.LogRecord) -> None:
        emit({"what": "log", "message": record.getMessage()})


if __name__ == "__main__":
    main()
