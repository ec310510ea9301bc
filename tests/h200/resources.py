"""What the kernels of jitted functions take of an H200, on a machine that has no GPU.

    python tests/h200/resources.py FILE '[{...}, ...]'

Each object holds the arguments of `program` in FILE, which returns what compile.py asks of a
function there. Printed is a line of JSON for each.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compile import _load, compile_for_h200, configure

# PTX is dumped unasked by jax 0.10. Without the pattern, MLIR would be dumped too, for seconds.
FLAGS = "" if version("jax") < "0.11" else "--xla_gpu_dump_llvmir=true --xla_dump_emitter_re=ptx"


def resources(file: str, requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """XLA's memory and kinds of thunks, and the Triton kernels with what ptxas says of them."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        configure(dump)
        os.environ["XLA_FLAGS"] += f" {FLAGS}"
        module = _load(file)
        for request in requests:
            jitted, args, kwargs = module.program(**request)
            compiled = compile_for_h200(jitted, args, kwargs, dump, {})
            yield {
                "memory": compiled.memory,
                "kinds": [thunk.kind for thunk in compiled.thunks],
                "kernels": [_kernel(path, dump) for path in dump.glob("*.ptx")],
            }
            for path in dump.iterdir():
                path.unlink()


def _kernel(path: Path, dump: Path) -> dict[str, Any]:
    """Name, registers, bytes spilled and shared, and matrix products of the kernel in a file."""
    ptxas = ["ptxas", "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
    text = subprocess.run(ptxas, capture_output=True, text=True, check=True).stderr
    name = re.search(r"entry function '(\w+)'", text)[1]
    (thunks,) = (path.read_text() for path in dump.glob("*thunk_sequence.txt"))
    ptx = path.read_text()
    return {
        "name": name,
        "registers": int(re.search(r"Used (\d+) registers", text)[1]),
        "spills": sum(int(number) for number in re.findall(r"(\d+) bytes spill", text)),
        "shared_memory": int(re.search(rf"\] {name} grid.*shared_memory: (\d+)", thunks)[1]),
        "products": sorted(set(re.findall(r"(wgmma\.mma_async|mma\.sync)", ptx))),
        "has_tf32": "tf32" in ptx,
    }


if __name__ == "__main__":
    for report in resources(sys.argv[1], json.loads(sys.argv[2])):
        print(json.dumps(report), flush=True)
