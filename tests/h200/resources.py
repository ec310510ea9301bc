"""What ptxas says of the kernels of a program, compiled for an H200 without one.

    python tests/h200/resources.py FILE '[{"function": NAME, "arguments": {...}, ...}, ...]'

Requests are compile.py's. Prints one JSON list, of each request the kernels by name.
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
ENTRY = re.compile(r"Compiling entry function '(\w+)'.*?(?=Compiling entry function|\Z)", re.S)
MMA = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async)\.")


@dataclass(frozen=True)
class Resources:
    """A kernel's, as ptxas allots them and XLA launches it."""

    registers: int
    spilled: int  # bytes stored and loaded
    shared: int  # bytes, those of the launch included
    tensor_cores: int  # instructions for them


def read_resources(dump: Path, before: set[Path]) -> dict[str, Resources]:
    """By name, of the PTX that is new in `dump`."""
    found = {}
    new = set(dump.iterdir()) - before
    plans = [path.read_text() for path in new if path.name.endswith("thunk_sequence.txt")]
    for path in new:
        if path.suffix != ".ptx":
            continue
        ptxas = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
        command = [ptxas, "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        bodies = re.split(r"\.entry ", path.read_text())[1:]
        tensor_cores = {re.match(r"\w+", body)[0]: len(MMA.findall(body)) for body in bodies}  # pyright: ignore
        for entry in ENTRY.finditer(said):
            name, text = entry[1], entry[0]

            def number(pattern, text=text):
                return sum(map(int, re.findall(pattern, text)))

            launches = [re.search(rf"{name}\b.*", plan) for plan in plans]
            dynamic = [
                re.search(r"shmem_bytes=(\d+)|shared_memory[^\d]*(\d+)", x[0])
                for x in launches
                if x
            ]
            shared = max((int(next(filter(None, x.groups()))) for x in dynamic if x), default=0)
            found[name] = Resources(
                number(r"Used (\d+) registers"),
                number(r"(\d+) bytes spill"),
                number(r"(\d+) bytes smem") + shared,
                tensor_cores[name],
            )
    return found


def main() -> None:
    file, requests = sys.argv[1], json.loads(sys.argv[2])
    os.environ["XLA_FLAGS"] = FLAGS
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        dump = Path(os.environ.get("KEEP", folder))
        configure(dump)
        module, reports = _load(file), []
        for request in requests:
            jitted, args, kwargs = getattr(module, request["function"])(**request["arguments"])
            before = set(dump.iterdir())
            compile_for_h200(jitted, args, kwargs, dump, request.get("options", {}))
            kernels = read_resources(dump, before)
            reports.append({name: asdict(kernel) for name, kernel in kernels.items()})
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
