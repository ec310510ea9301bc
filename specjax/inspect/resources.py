"""Reads the resources of XLA modules' kernels from ptxas: registers, spills and shared memory."""

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

PTXAS = Path("/usr/local/cuda/bin/ptxas"), Path("/usr/local/bin/ptxas")
MOSAIC_SUFFIX = "_mosaic_gpu_kernel"

ENTRY = re.compile(r"Compiling entry function '([^']+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
STATIC = re.compile(r"(\d+) bytes smem")
PRODUCT = re.compile(r"\b(wgmma\.mma_async|mma\.sync)\S*?\.(tf32|bf16|f16|e4m3)\b")
MULTIPLY_ADD = re.compile(r"// begin inline asm\s+fma\.rn\.f32 ")
BARRIER = re.compile(r"\bbar(?:rier)?\.sync\b")
LAUNCH = re.compile(
    r"kCustomKernel +\[[^\]]*\] *(\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\] +"
    r"shared_memory: (\d+)"
)


@dataclass(frozen=True)
class Resources:
    """The resources and launch dimensions of one kernel."""

    name: str  # for Pallas, the kernel's name; XLA appends a number if kernels have the same name
    registers: int  # per thread
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    # The next three fields are None for Mosaic kernels, whose launches XLA does not know.
    dynamic_shared_bytes: int | None = None
    grid: tuple[int, ...] | None = None
    threads: tuple[int, ...] | None = None
    is_mosaic: bool = False
    products: tuple[str, ...] = ()  # kinds of matrix products by PTX name, like "mma.sync bf16"
    multiply_adds: int = 0  # number of `triton_call.multiply_add` in the PTX, one per element
    # For each barrier of all threads, the number of multiply_adds before it.
    barriers: tuple[int, ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Resources":
        """Return the `Resources` with these fields, which were parsed from JSON."""
        shape = {name: fields[name] and tuple(fields[name]) for name in ("grid", "threads")}
        return cls(**{**fields, **shape})

    @property
    def shared_bytes(self) -> int:
        """Bytes of static and dynamic shared memory per thread block.

        If the dynamic size is unknown, only static shared memory is counted.
        """
        return self.static_shared_bytes + (self.dynamic_shared_bytes or 0)

    @property
    def kernel(self) -> str:
        """The kernel's name without the number that XLA appends."""
        return re.sub(r"_+\d+$", "", self.name)

    @property
    def spills(self) -> bool:
        """Whether the kernel spills registers."""
        return self.spill_store_bytes + self.spill_load_bytes > 0


class _Launched(NamedTuple):
    grid: tuple[int, ...]
    threads: tuple[int, ...]
    shared_bytes: int


def find_ptxas() -> str:
    """Return the path of ptxas.

    Raises:
        ValueError: ptxas was not found; the message says what to install.
    """
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = shutil.which("ptxas")
    places = [*packages.glob("*/bin/ptxas"), *PTXAS, *([Path(found)] if found else [])]
    for place in places:
        if place.exists() and os.access(place, os.X_OK):
            return str(place)
    raise ValueError(
        "ptxas was not found, which is needed to compile for a GPU; pip install nvidia-cuda-nvcc "
        "nvidia-nvvm, or install a CUDA toolkit in /usr/local/cuda"
    )


def read_resources(
    ptx: Sequence[Path], thunks: str, mosaic: str, architecture: str
) -> Iterator[Resources]:
    """Yield the resources of each kernel that an XLA module launches.

    Args:
        ptx: the files with the module's dumped PTX.
        thunks: the text of the module's dumped thunk sequence.
        mosaic: the output printed during compilation with MOSAIC_GPU_DUMP_PTXAS.
        architecture: the GPU's architecture, like "sm_90a".
    """
    launched = dict(_launches(thunks))
    with ThreadPoolExecutor() as pool:
        said = "\n".join(pool.map(partial(assemble, architecture), ptx))
    bodies = dict(_bodies(ptx))
    for found in parse_ptxas(said):
        if launch := launched.get(found.name):
            yield _replace(found, launch, bodies[found.name])
    for found in parse_ptxas(mosaic):
        name = found.name.removesuffix(MOSAIC_SUFFIX)
        yield Resources(**{**vars(found), "name": name, "is_mosaic": True})


def assemble(architecture: str, ptx: Path) -> str:
    """Return the output of `ptxas -v` for a PTX file."""
    command = [find_ptxas(), "-v", f"-arch={architecture}", str(ptx), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return done.stdout + done.stderr


def parse_ptxas(text: str) -> Iterator[Resources]:
    """Yield the resources of each entry function in the output of `ptxas -v`.

    A function is skipped if the output does not have both its registers and its spills. The fields
    that are not in the output keep their defaults.
    """
    names = ENTRY.split(text)[1:]
    for name, said in zip(names[::2], names[1::2], strict=True):
        spills, used = SPILLS.search(said), USED.search(said)
        if spills and used:
            stack, stores, loads = map(int, spills.groups())
            static = STATIC.search(said)
            yield Resources(
                name, int(used[1]), stack, stores, loads, int(static[1]) if static else 0
            )


def _launches(thunks: str) -> Iterator[tuple[str, _Launched]]:
    for name, grid, threads, shared in LAUNCH.findall(thunks):
        yield name, _Launched(_numbers(grid), _numbers(threads), int(shared))


def _bodies(ptx: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for path in ptx:
        for body in path.read_text().split(".entry ")[1:]:
            yield body.partition("(")[0].strip(), body


def _replace(found: Resources, launch: _Launched, body: str) -> Resources:
    products = {f"{kind} {dtype}" for kind, dtype in PRODUCT.findall(body)}
    fields = {**vars(found), "grid": launch.grid, "threads": launch.threads}
    fields |= {"dynamic_shared_bytes": launch.shared_bytes, "products": tuple(sorted(products))}
    before = [len(MULTIPLY_ADD.findall(body[: found.start()])) for found in BARRIER.finditer(body)]
    fields |= {"multiply_adds": len(MULTIPLY_ADD.findall(body)), "barriers": tuple(before)}
    return Resources(**fields)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
