"""What ptxas makes of the kernels of jitted functions: registers, spills, shared memory.

    python tests/h200/resources.py FILE '[{"function": NAME, "arguments": {...}}, ...]'

As compile.py, with "kernels" added to each report: {name: {"registers", "spills", "shared"}},
the last in bytes and the most that any kernel of the function is launched with.
Dumping the PTX takes most of the time, seconds per kernel.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from compile import _load, compile_for_h200, configure, report

DUMPS_PTX = "--xla_gpu_dump_llvmir=true --xla_dump_emitter_re=.*"  # both, from jax 0.11 on


def resources(dump: Path) -> dict[str, dict[str, int]]:
    """Of every kernel in a folder of dumps."""
    found: dict[str, dict[str, int]] = {}
    for ptx in dump.glob("*.ptx"):
        command = ["ptxas", "-v", "-arch=sm_90a", str(ptx), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for part in said.split("Compiling entry function")[1:]:
            name = re.search(r"'(\w+)'", part)
            used = re.search(r"Used (\d+) registers", part)
            assert name and used
            spills = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
            found[name[1]] = {"registers": int(used[1]), "spills": spills, "shared": 0}
    launches = "".join(file.read_text() for file in dump.glob("*thunk_sequence*.txt"))
    most = max(map(int, re.findall(r"shared_memory: (\d+) bytes", launches)))
    for kernel in found.values():
        kernel["shared"] = most
    return found


def main() -> None:
    file, requests = sys.argv[1], json.loads(sys.argv[2])
    reports = []
    with redirect_stdout(sys.stderr):
        folder = Path(tempfile.mkdtemp())
        configure(folder)
        os.environ["XLA_FLAGS"] += f" {DUMPS_PTX}"
        module = _load(file)
        for request in requests:
            for old in folder.iterdir():
                old.unlink()
            jitted, args, kwargs = getattr(module, request["function"])(**request["arguments"])
            compiled = compile_for_h200(jitted, args, kwargs, folder, {})
            reports.append({**report(compiled, None), "kernels": resources(folder)})
        for old in folder.iterdir():
            old.unlink()
        folder.rmdir()
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
