"""Runs small cases of `smoke` in compute-sanitizer, which finds accesses out of bounds."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from one_case import MARK
from timing import Setting

TOOL = "compute-sanitizer"
# The usual memory pool would hide accesses out of an array's bounds but within the pool.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
ERRORS = 86  # exit status of the tool if it found errors


def check_memory(setting: Setting) -> Iterator[dict[str, Any]]:
    """Run the cases in compute-sanitizer. On a CPU without this tool, run the cases alone."""
    tool = shutil.which(TOOL)
    if tool is None and not setting.is_cpu:
        yield {"what": "memory", "absent": f"there is no {TOOL}"}
        return
    prefix = [tool, "--tool", "memcheck", "--error-exitcode", str(ERRORS)] if tool else []
    case = {
        "function": "smoke:check_smoke",
        "is_cpu": setting.is_cpu,
        "arguments": {"only_tiny": True, "most": setting.pick(None, 1)},
    }
    script = Path(__file__).with_name("one_case.py")
    command = [*prefix, sys.executable, str(script), json.dumps(case)]
    said, options = [], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=os.environ | ENVIRONMENT, **options) as process:
        for line in process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK)) | {"way": TOOL}
            else:
                said = [*said, line][-40:]
    code = process.returncode
    yield {"what": "memory", "code": code, "passes": code == 0, "end": "".join(said)[-1200:]}
