"""Compiles jitted functions for a named GPU on a machine without this GPU, and reports on them.

    compile_functions(FILE, [{"function": NAME, "arguments": {...}, ...}, ...])

FILE has a function NAME, and NAME(**arguments) returns (jitted, args, kwargs). `jitted` is the
result of `jax.jit`; its options, such as donated arguments, are respected. `args` are pytrees of
`jax.ShapeDtypeStruct`. `kwargs` are the static arguments. Each dict of the list is a request. It
may have further keys:

- "gpu": a name in `gpus` (default: h200);
- "mesh": for several GPUs, the name of the mesh's axis and the number of GPUs. NAME then takes a
  further argument `mesh`, and args may have a `NamedSharding` on any mesh with this axis;
- "options": XLA compiler options by name;
- "passes_over": the argument `over` of `report`;
- "traffic": the argument `traffic` of `report`.

Nothing runs, so GEMMs keep the configuration that XLA chooses without autotuning. XLA reads its
flags once per process. Therefore the functions are compiled by a separate process, python -m
specjax.inspect.compile, which prints the reports as one JSON list. The process needs jax's CUDA
plugin, ptxas and libdevice. ptxas and libdevice come from a toolkit in /usr/local/cuda, or from the
packages nvidia-cuda-nvcc and nvidia-nvvm.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specjax.inspect.gpus import GPU
from specjax.inspect.hlo import large_copies, launches, num_passes, passes_over, unknown_loops
from specjax.inspect.kept import Kept, digest_of
from specjax.inspect.pallas_bytes import CachedContext
from specjax.inspect.resources import Resources, find_ptxas, read_resources

PLUGINS = "xla_cuda13", "xla_cuda12"
THUNK = re.compile(r"( *)(?:\d+: (k\w+) +\[[^\]]*\] *(\S*)|(\w+):$)")
# The code of a Pallas kernel, in the attributes of its call.
CODE = re.compile(r'\b(ir|module) = "[^"]*"')
AFTER_LAYERS = 1_000_000  # layer number of kernels after the last layer
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Thunk:
    """A thunk: one entry of XLA's plan of launches."""

    kind: str  # kCustomKernel, kCublasLtMatmul, kConditional, kCommandBuffer, ...
    name: str
    # Kinds and labels of the enclosing thunks, as XLA prints them, like body or branch_0. For a
    # boolean predicate, XLA swaps the labels: true_branch runs if the predicate is false.
    within: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """A compiled function."""

    device_kind: str  # the name of the GPU that kernels see
    hlo: str  # text of the optimized module, without the code of Pallas kernels
    thunks: tuple[Thunk, ...]  # the thunks after command buffers were formed
    memory: Mapping[str, int]  # bytes: argument, output, alias, temp, peak
    seconds: Mapping[str, float]  # durations: trace, compile
    resources: tuple[Resources, ...] | None  # per kernel; None if not requested
    is_kept: bool = False  # whether an earlier process compiled it (see `Kept`)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Compiled":
        """Return the `Compiled` with these fields, which were parsed from JSON."""
        thunks = tuple(
            Thunk(one["kind"], one["name"], tuple(one["within"])) for one in fields["thunks"]
        )
        resources = fields["resources"] and tuple(map(Resources.of, fields["resources"]))
        return cls(**{**fields, "thunks": thunks, "resources": resources})


def has_cuda_plugin() -> bool:
    """Return whether jax's CUDA plugin is installed, with or without a GPU."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.{plugin}") for plugin in PLUGINS)


def check_tools() -> None:
    """Check that the tools for compiling are installed.

    Raises:
        ValueError: jax's CUDA plugin or ptxas is missing; the message says what to install.
    """
    if not has_cuda_plugin():
        version = importlib.metadata.version("jax")
        raise ValueError(
            f"jax {version} has no CUDA plugin, which is needed to compile for a GPU (a GPU is "
            f"not); pip install 'jax[cuda13]=={version}', or without CUDA's libraries "
            f"jax-cuda13-plugin=={version} and jax-cuda13-pjrt=={version}"
        )
    find_ptxas()


def compile_functions(
    file: str | Path,
    requests: Sequence[Mapping[str, Any]],
    *,
    resources: bool = False,
    timeout: float = 600,
    kept: Kept | None = None,
) -> list[dict[str, Any]]:
    """Compile the requests in a separate process; return a `report` for each request.

    Args:
        resources: whether ptxas reports registers, spills and shared memory of every kernel.
        timeout: the maximum seconds for all requests together.
        kept: a folder of compiled functions. A function in this folder is not compiled again,
            unless `kept.recompiles`. Any other function is added to the folder. None to compile
            all functions.

    Raises:
        ValueError: see `check_tools`.
        RuntimeError: the process failed; the message has the end of its stderr.
        subprocess.TimeoutExpired: the process took longer than `timeout`.
    """
    check_tools()
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    path = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    command = [sys.executable, "-m", "specjax.inspect.compile", str(file), json.dumps(requests)]
    if kept is not None:
        command += ["--kept", str(kept.folder)] + ["--recompile"] * kept.recompiles
    done = subprocess.run(
        command + ["--resources"] * resources,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(f"compiling failed: {done.stderr[-4000:]}")
    made = json.loads(done.stdout)
    if kept is not None:
        for request, one in zip(requests, made, strict=True):
            arguments = {"file": file, "requests": [request], "resources": resources}
            kept.used += [(arguments, one)] * one["is_kept"]
            kept.num_compiled += not one["is_kept"]
    return made


def configure(dump: Path, *, resources: bool = False) -> None:
    """Set the environment variables of XLA and Mosaic. Call this before importing jax."""
    assert "jax" not in sys.modules
    os.environ["JAX_PLATFORMS"] = "cpu"  # the CUDA plugin then does not look for a driver
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # a cached executable dumps nothing
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # no lines of files: see `digest_of`
    flags = f"--xla_gpu_autotune_level=0 --xla_dump_to={dump} --xla_dump_hlo_as_text"
    if resources:
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        if importlib.metadata.version("jax").split(".")[:2] != ["0", "10"]:
            # jax 0.10 dumps PTX without flags. Dumps of other emitters would take seconds each.
            flags += " --xla_gpu_dump_llvmir=true --xla_dump_emitter_re=ptx"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"


def mesh_of(gpu: GPU, axis: str, num_devices: int) -> Any:
    """Return a mesh of `num_devices` GPUs on one axis. The GPUs need not be present."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    jax.devices("cpu")  # makes jax find its plugins
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=gpu.target_config,
        topology=f"1x1x{num_devices}",
    )
    return Mesh(np.array(topology.devices), (axis,))


def compile_for(
    gpu: GPU,
    mesh: Any,
    jitted: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
    dump: Path,
    options: Mapping[str, Any],
    *,
    resources: bool = False,
    kept: Kept | None = None,
) -> Compiled:
    """Compile `jitted` for the GPUs of `mesh` (see `mesh_of`) and for the shapes of `args`.

    `dump` is the folder that `configure` was called with. `options` are XLA's compiler options,
    such as {"xla_gpu_enable_triton_gemm": False}. A function that is in `kept` is not compiled,
    unless `kept.recompiles`. Any other function is added to `kept`.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    def place(x: Any) -> Any:
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed = jax.tree.map(place, args)
    before, start = set(dump.iterdir()), time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # kernels read the device kind from it
        with _stdout_into(dump / "mosaic.txt") as said:
            lowered = jitted.lower(*placed, **kwargs)
            traced = time.perf_counter()
            flags = os.environ["XLA_FLAGS"].replace(str(dump), ""), f"resources={resources}"
            digest = kept and digest_of(lowered.as_text(debug_info=True), gpu, options, flags)
            if kept and digest and (found := kept.find(digest)):
                return Compiled.of({**found, "is_kept": True})
            compiled = lowered.compile(compiler_options=dict(options))
    seconds = {"trace": traced - start, "compile": time.perf_counter() - traced}
    hlo = CODE.sub(r'\1 = ""', compiled.as_text())
    name = re.match(r"HloModule ([\w.\-]+)", hlo)[1]  # pyright: ignore
    new = sorted(set(dump.iterdir()) - before)
    dumped = [file for file in new if f".{name}." in file.name]
    sizes = compiled.memory_analysis()
    memory = {
        kind: getattr(sizes, f"{kind}_size_in_bytes")
        for kind in ("argument", "output", "alias", "temp")
    }
    memory["peak"] = getattr(sizes, "peak_memory_in_bytes", 0)
    thunks, found = _thunk_sequence(dumped), None
    if resources:
        ptx = [file for file in dumped if file.suffix == ".ptx"]
        read = read_resources(ptx, thunks, said.read_text(), gpu.architecture)
        found = tuple(sorted(read, key=lambda one: one.name))  # threads dump kernels in any order
    kind = mesh.devices.flat[0].device_kind
    made = Compiled(kind, hlo, parse_thunks(thunks), memory, seconds, found)
    if kept and digest:
        kept.put(digest, asdict(made))
    return made


@contextmanager
def _stdout_into(file: Path) -> Iterator[Path]:
    """Redirect the process's standard output, including output of C code, to `file`."""
    sys.stdout.flush()
    kept = os.dup(1)
    with file.open("wb") as opened:
        os.dup2(opened.fileno(), 1)
        try:
            yield file
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def parse_thunks(text: str) -> tuple[Thunk, ...]:
    """Return the thunks of a dumped thunk sequence; each thunk names its enclosing thunks."""
    thunks: list[Thunk] = []
    around: list[tuple[int, str]] = []
    indent = 0
    for line in re.sub(r" *No thunks\.", "\n", text).splitlines():
        if found := THUNK.match(line):
            blanks, kind, name, label = found.groups()
            # XLA indents every label except this one, which follows its loop.
            indent = indent + 2 if label == "condition" else len(blanks)
            while around and around[-1][0] >= indent:
                around.pop()
            if kind:
                thunks.append(Thunk(kind, name, tuple(word for _, word in around)))
            around.append((indent, kind or label))
    return tuple(thunks)


def _thunk_sequence(dumped: list[Path]) -> str:
    """Return the text of the final thunk sequence (XLA's plan of launches).

    XLA's thunk passes may change the first sequence. Only then does XLA dump a second one.
    """
    for ending in "thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt":
        for file in dumped:
            if file.name.endswith(ending):
                return file.read_text()
    raise FileNotFoundError("XLA dumped no thunk sequence; did it compile for the GPU?")


def report(
    compiled: Compiled,
    over: Mapping[str, int] | None = None,
    traffic: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a description of a compiled function, as JSON-compatible types.

    Args:
        over: the arguments of `hlo.passes_over`, whose result is in "passes". "num_passes" then has
            two counts of passes (see hlo.py): for runs in which every conditional takes branch 0,
            and for runs in which every conditional takes branch 1. None for a report without these.
        traffic: a dict with the keys below. The report then has the results of `hlo.launches`,
            `hlo.large_copies` and `hlo.unknown_loops` under these names. None to leave them out.

    The keys of `traffic` are:

    - "batch", "context", "rows", "num_chosen": the fields of `CachedContext`;
    - "rows_within": a mapping from regexes to numbers of rows. In a scope, the number of the first
      matching regex replaces "rows";
    - "layers": a regex over names of parameters; its group matches the index of the parameter's
      layer;
    - "after": a regex over names of parameters that are read after all layers;
    - "inside": a regex over scopes; operations in matching scopes belong to layers.
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
    if traffic:
        fields = {name: traffic[name] for name in CachedContext._fields if name in traffic}
        rows_within = traffic.get("rows_within", {})

        def load_of(scope: str) -> CachedContext:
            rows = [rows for part, rows in rows_within.items() if re.search(part, scope)]
            return CachedContext(**fields | {"rows": rows[0]} if rows else fields)

        layers, after = traffic.get("layers", "$^"), traffic.get("after", "$^")
        inside = re.compile(traffic.get("inside", ""))

        def layer_of(name: str) -> int | None:
            found = re.search(layers, name)
            return int(found[1]) if found else AFTER_LAYERS if re.search(after, name) else None

        found = launches(compiled.hlo, load_of, layer_of, lambda name: bool(inside.search(name)))
        made["launches"] = [asdict(one) for one in found]
        made["large_copies"] = [asdict(one) for one in large_copies(found)]
        made["unknown_loops"] = unknown_loops(compiled.hlo)
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
    parser.add_argument("--resources", action="store_true", help="run ptxas on every kernel")
    parser.add_argument("--kept", type=Path, help="folder of compiled functions (see `Kept`)")
    parser.add_argument("--recompile", action="store_true", help="compile what is kept, too")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        configure(Path(folder), resources=parsed.resources)
        module, reports = _load(parsed.file), []
        kept = parsed.kept and Kept(parsed.kept, parsed.recompile)
        for request in parsed.requests:
            make = getattr(module, request["function"])
            gpu, arguments = GPU.named(request.get("gpu", "h200")), request.get("arguments", {})
            mesh = mesh_of(gpu, *request.get("mesh", ("x", 1)))
            if "mesh" in request:
                arguments = arguments | {"mesh": mesh}
            jitted, args, kwargs = make(**arguments)
            options = request.get("options", {})
            compiled = compile_for(
                *(gpu, mesh, jitted, args, kwargs, Path(folder), options),
                resources=parsed.resources,
                kept=kept,
            )
            reports.append(report(compiled, request.get("passes_over"), request.get("traffic")))
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
