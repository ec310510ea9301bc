"""How the tests' programs are compiled, and what was compiled."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from specjax.engine.compiled import Toolchain
from specjax.engine.compiler import FOR_ALL

COMPILED = "/jax/core/compile/backend_compile_duration"


class Kept(dict):
    """The programs of the last engines, so that an engine finds those of one like it that was
    closed."""

    def setdefault(self, static: Any, jits: Any) -> Any:
        """Count an engine as the last one, and forget the first of too many."""
        self[static] = found = self.pop(static, jits)
        if len(self) > MAX_KEPT:
            del self[next(iter(self))]
        return found


MAX_KEPT = 12
KEPT = Kept()
# Nothing is kept on disk, as tests change what is compiled, and a worker has many engines.
TOOLCHAIN = Toolchain(jits=KEPT, find_folder=lambda: None, maps_for_shapes=FOR_ALL)
MAX_MAPS = 20_000  # memory maps; a process may have 65,530, and each program takes 30 to 300
MAX_BYTES, ROOM = 5 << 28, 1 << 29  # resident, and above what other libraries hold


def share_compilations(folder: Path) -> None:
    """Keep programs for the other processes of a run, and for later ones.

    Without a limit of size, with which JAX reads the whole folder whenever an entry is added. It
    does not lock the folder then: an entry that another process has half written is compiled.
    """
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def compile_quickly() -> None:
    """Compile in less than half the time programs that run slowly, and may round otherwise.

    Until JAX 0.11, XLA may also do without its fusion emitters, which make most of the code, and
    leave a program in one piece, since all cores are busy with others.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_traceback_in_locations_limit", 0)  # where operations come from
    if jax.__version_info__ < (0, 11):
        flags = os.environ.get("XLA_FLAGS", "")
        quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{flags} {quick}".strip()


def count_maps() -> int:
    """Memory maps of this process; 0 where they cannot be counted."""
    maps = Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else 0


def count_bytes() -> int:
    """Resident memory of this process; 0 where it cannot be told."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


@dataclass
class Process:
    """This process's memory, of which programs take most."""

    max_bytes: int = MAX_BYTES

    def keep_small(self) -> None:
        """If it is large, free all programs, and give their memory back to the system."""
        if count_maps() < MAX_MAPS and count_bytes() < self.max_bytes:
            return
        KEPT.clear()
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        assert count_maps() < MAX_MAPS / 2, "programs outlive their tests: close engines"
        self.max_bytes = max(MAX_BYTES, count_bytes() + ROOM)


@dataclass
class CompilationLog:
    """Every compilation of this process, those that a cache answered included."""

    names: list[str] = field(default_factory=list)

    def listen(self, event: str, _: float, **details: Any) -> None:
        """Note a compilation; for `jax.monitoring`."""
        if event == COMPILED:
            self.names.append(str(details.get("fun_name")))

    @contextmanager
    def none_expected(self) -> Iterator[None]:
        """Fail if anything compiles inside the block."""
        before = len(self.names)
        yield
        assert not self.names[before:]
