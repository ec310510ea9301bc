"""Compile jitted functions for an H200 on a machine that has no GPU, and report what XLA made.

    python tests/h200/compile.py FILE '[{"function": NAME, "arguments": {...}, ...}, ...]'

A process of its own, because XLA reads its flags once: run it by `compile_for_h200` of conftest.
NAME(**arguments) in FILE returns (jitted, args, kwargs): `jitted` from `jax.jit`, with whatever it
donates; args, pytrees of `jax.ShapeDtypeStruct`; and kwargs, the static arguments. A request may
add "options", XLA's by name, and "passes_over", the arguments of `hlo.passes_over`. The reports
are printed as one JSON list. Nothing runs: GEMMs are as XLA configures them without autotuning.
Needs jax's CUDA plugin, and ptxas and libdevice: a toolkit in /usr/local/cuda, or the packages
nvidia-cuda-nvcc and nvidia-nvvm.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlo import num_passes, passes_over

TARGET = Path(__file__).with_name("h200.txtpb")
THUNK = re.compile(r"( *)(?:\d+: (k\w+) +\[[^\]]*\] *(\S*)|(\w+):$)")


@dataclass(frozen=True)
class Thunk:
    """A line of XLA's plan of what the host launches."""

    kind: str  # kCustomKernel, kCublasLtMatmul, kConditional, kCommandBuffer, ...
    name: str
    # Kinds of the thunks around it, and labels as XLA prints them: body, branch_0, and for a
    # predicate, the wrong way round, true_branch for what runs when it is false.
    within: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """What XLA made of a function."""

    hlo: str  # optimized
    thunks: tuple[Thunk, ...]  # after command buffers were formed
    memory: Mapping[str, int]  # bytes: argument, output, alias, temp
    seconds: Mapping[str, float]  # trace, compile


def configure(dump: Path) -> None:
    """Set the environment that XLA reads; before jax is imported."""
    assert "jax" not in sys.modules
    os.environ["JAX_PLATFORMS"] = "cpu"  # the CUDA plugin then does not look for a driver
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # a cached executable dumps nothing
    flags = f"--xla_gpu_autotune_level=0 --xla_dump_to={dump} --xla_dump_hlo_as_text"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"


def compile_for_h200(
    jitted: Any, args: tuple, kwargs: Mapping[str, Any], dump: Path, options: Mapping[str, Any]
) -> Compiled:
    """Compile `jitted` at the shapes of `args` for one H200; `dump` is what `configure` was told.

    Options are XLA's for this compilation, such as {"xla_gpu_enable_triton_gemm": False}.
    """
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.devices("cpu")  # makes jax find its plugins
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=TARGET.read_text(),
        topology="1x1x1",
    )
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    before, start = set(dump.iterdir()), time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # kernels ask it for the device kind
        lowered = jitted.lower(*placed, **kwargs)
        traced = time.perf_counter()
        compiled = lowered.compile(compiler_options=dict(options))
    seconds = {"trace": traced - start, "compile": time.perf_counter() - traced}
    hlo = compiled.as_text()
    name = re.match(r"HloModule ([\w.\-]+)", hlo)[1]  # pyright: ignore
    dumped = [file for file in set(dump.iterdir()) - before if f".{name}." in file.name]
    sizes = compiled.memory_analysis()
    memory = {
        kind: getattr(sizes, f"{kind}_size_in_bytes")
        for kind in ("argument", "output", "alias", "temp")
    }
    return Compiled(hlo, parse_thunks(_thunk_sequence(dumped)), memory, seconds)


def parse_thunks(text: str) -> tuple[Thunk, ...]:
    """The thunks of a dumped sequence, each with those around it."""
    thunks: list[Thunk] = []
    around: list[tuple[int, str]] = []
    indent = 0
    for line in re.sub(r" *No thunks\.", "\n", text).splitlines():
        if found := THUNK.match(line):
            blanks, kind, name, label = found.groups()
            # XLA indents every label but this one, which follows its loop.
            indent = indent + 2 if label == "condition" else len(blanks)
            while around and around[-1][0] >= indent:
                around.pop()
            if kind:
                thunks.append(Thunk(kind, name, tuple(word for _, word in around)))
            around.append((indent, kind or label))
    return tuple(thunks)


def _thunk_sequence(dumped: list[Path]) -> str:
    """XLA writes a second sequence only if its passes changed the first."""
    for ending in "thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt":
        for file in dumped:
            if file.name.endswith(ending):
                return file.read_text()
    raise FileNotFoundError("XLA dumped no thunk sequence; did it compile for the GPU?")


def report(compiled: Compiled, over: Mapping[str, int] | None) -> dict[str, Any]:
    """What a test asserts on, as JSON can hold it.

    `num_passes` is for runs in which every conditional takes its branch 0, and its branch 1.
    """
    made = asdict(compiled)
    made["top_level"] = [thunk.kind for thunk in compiled.thunks if not thunk.within]
    made["is_one_command_buffer"] = made["top_level"] == ["kCommandBuffer"]
    made["uncaptured_conditionals"] = [
        thunk.name
        for thunk in compiled.thunks
        if thunk.kind == "kConditional" and "kCommandBuffer" not in thunk.within
    ]
    if over:
        passes = passes_over(compiled.hlo, **over)
        made["passes"] = [asdict(one) for one in passes]
        made["num_passes"] = [num_passes(passes, branch) for branch in (0, 1)]
    return made


def _load(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", help="Python file with the functions")
    parser.add_argument("requests", type=json.loads, help="JSON list; see this file's docstring")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        configure(Path(folder))
        module, reports = _load(parsed.file), []
        for request in parsed.requests:
            make = getattr(module, request["function"])
            jitted, args, kwargs = make(**request.get("arguments", {}))
            options = request.get("options", {})
            compiled = compile_for_h200(jitted, args, kwargs, Path(folder), options)
            reports.append(report(compiled, request.get("passes_over")))
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
