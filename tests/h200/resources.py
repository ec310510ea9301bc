"""What ptxas allots to the kernels of programs, compiled for an H200 as compile.py does.

    python tests/h200/resources.py FILE '[{"function": NAME, "arguments": {...}, ...}, ...]'

Prints one JSON list: for each request, its Pallas kernels by name.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

from compile import _load, compile_for_h200, configure

FLAGS = "--xla_gpu_dump_llvmir=true --xla_dump_emitter_re=.*"  # without them jax 0.11 dumps no PTX
COMPILED = re.compile(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", re.S)
TENSOR_CORES = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async)\.")


@dataclass(frozen=True)
class Resources:
    """Of one kernel, as it is launched."""

    registers: int
    spilled: int  # bytes stored and loaded
    shared: int  # bytes
    tensor_cores: int  # instructions for them


def read_resources(files: set[Path]) -> dict[str, Resources]:
    """By name, of the PTX among dumped files; the shared memory is in XLA's plan."""
    plan = "".join(x.read_text() for x in files if x.name.endswith("thunk_sequence.txt"))
    found = {}
    for path in files:
        if path.suffix != ".ptx":
            continue
        ptxas = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
        command = [ptxas, "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        bodies = {body.split("(")[0]: body for body in path.read_text().split(".entry ")[1:]}
        for name, text in COMPILED.findall(said):
            numbers = [
                sum(map(int, re.findall(pattern, text)))
                for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill")
            ]
            launched = re.search(rf"\b{name}\b.*shared_memory: (\d+)", plan)
            shared = int(launched[1]) if launched else 0
            found[name] = Resources(*numbers, shared, len(TENSOR_CORES.findall(bodies[name])))
    return found


def main() -> None:
    file, requests = sys.argv[1], json.loads(sys.argv[2])
    os.environ["XLA_FLAGS"] = FLAGS
    reports = []
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        dump = Path(folder)
        configure(dump)
        module = _load(file)
        for request in requests:
            jitted, args, kwargs = getattr(module, request["function"])(**request["arguments"])
            before = set(dump.iterdir())
            compile_for_h200(jitted, args, kwargs, dump, request.get("options", {}))
            kernels = read_resources(set(dump.iterdir()) - before)
            reports.append({name: asdict(kernel) for name, kernel in kernels.items()})
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
