"""Settings for fast compilation in tests, and a log of compilations."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from specjax.engine.compiled import CompiledPrograms, Toolchain
from specjax.engine.compiler import FOR_ALL
from specjax.engine.engine import Engine

COMPILED = "/jax/core/compile/backend_compile_duration"


class Kept(dict):
    """The compiled programs of the last `MAX_KEPT` engines.

    A new engine uses the programs of an earlier engine with the same model and sizes.
    """

    def setdefault(self, static: Any, jits: Any) -> Any:
        """Return the programs of an engine, and mark them as used last.

        If there are more than `MAX_KEPT` entries, drop the entry that was used least recently.
        """
        self[static] = found = self.pop(static, jits)
        if len(self) > MAX_KEPT:
            del self[next(iter(self))]
        return found


MAX_KEPT = 12
KEPT = Kept()
# Programs are not kept on disk, because tests change them, and a worker has many engines.
TOOLCHAIN = Toolchain(jits=KEPT, find_folder=lambda: None, maps_for_shapes=FOR_ALL)
QUICK = replace(TOOLCHAIN, options={})  # for programs that `compile_quickly` is for
MAX_MAPS = 20_000  # memory maps; a process may have 65,530, and each program takes 30 to 300
MAX_BYTES, ROOM = 5 << 28, 1 << 28  # of resident memory; ROOM is for other libraries
M_ARENA_MAX, MAX_ARENAS = -8, 2  # glibc's number of the option, and its value here


def share_compilations(folder: Path) -> None:
    """Keep compiled programs in `folder`, for other processes of this test run and for later runs.

    The size of the folder is not limited. With a limit, JAX would read the whole folder whenever it
    adds an entry. Without a limit, JAX does not lock the folder: a process that finds a
    half-written entry compiles the program itself.
    """
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def compile_quickly() -> None:
    """Make XLA compile in less than half the time.

    Programs then run slowly, and may round differently. Before JAX 0.11, two more flags are set.
    One turns off XLA's fusion emitters, which generate most of the code. The other stops XLA from
    compiling parts of a program in parallel, because other test processes already use all cores.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_traceback_in_locations_limit", 0)  # where operations come from
    if jax.__version_info__ < (0, 11):
        flags = os.environ.get("XLA_FLAGS", "")
        quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{flags} {quick}".strip()


def compile_in_child(root: Path) -> None:
    """Give a process that a test starts the compiler settings of the test's own process.

    `root` is the folder of the repository. Call this before the process compiles anything.
    """
    share_compilations(root / ".cache" / "jax")
    compile_quickly()
    make = partial(CompiledPrograms, toolchain=QUICK)
    Engine.make_programs = staticmethod(make)


def share_arenas() -> None:
    """Let threads allocate from the same arenas: memory that one frees, another can use."""
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, MAX_ARENAS)


def count_maps() -> int:
    """Return the number of memory maps of this process; 0 if it is unknown."""
    maps = Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else 0


def count_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if it is unknown."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


@dataclass
class Process:
    """Limits the memory of this process, most of which is taken by compiled programs."""

    max_bytes: int = MAX_BYTES

    def keep_small(self) -> None:
        """If the process is large, return free memory to the system.

        If it is still large, free all compiled programs, too.
        """
        if self._is_small():
            return
        _trim()
        if self._is_small():
            return
        KEPT.clear()
        jax.clear_caches()
        gc.collect()
        _trim()
        assert count_maps() < MAX_MAPS / 2, "programs outlive their tests: close engines"
        self.max_bytes = max(MAX_BYTES, count_bytes() + ROOM)

    def _is_small(self) -> bool:
        return count_maps() < MAX_MAPS and count_bytes() < self.max_bytes


def _trim() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@dataclass
class CompilationLog:
    """A log of all programs that this process compiles or loads from JAX's cache."""

    names: list[str] = field(default_factory=list)

    def listen(self, event: str, _: float, **details: Any) -> None:
        """Record a compilation. `jax.monitoring` calls this method."""
        if event == COMPILED:
            self.names.append(str(details.get("fun_name")))

    @contextmanager
    def none_expected(self) -> Iterator[None]:
        """Fail if a program is compiled inside the `with` block."""
        before = len(self.names)
        yield
        assert not self.names[before:]
