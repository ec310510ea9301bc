"""Keeps compiled programs on disk, so that a later process neither traces nor compiles them.

Each program has a file. The file's name is a digest of the values on which the program depends:
static arguments, shapes and dtypes, the Python files of specjax and pallas_kernels, the versions of
Python, JAX and the kernel compiler, the options of JAX and XLA, the device and the processor. The
digest does not cover other code, such as a user's own drafter or logits processors. Programs that
use such code are neither stored nor read. Reading a file can run arbitrary code, so a folder is not
used if anybody but its owner can write to it.
"""

import hashlib
import json
import logging
import os
import pickle
import platform
import stat
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
from jax.experimental import serialize_executable

from pallas_kernels.triton_call import packages_of_backend
from specjax.device.placement import Placement, default_device

log = logging.getLogger(__name__)

MAX_BYTES = 4 * 2**30  # per folder; beyond this, the least recently used files are deleted
ROOT = Path(__file__).parents[2]
SOURCES = ("specjax", "pallas_kernels")
TRACED = (
    "specjax.device",
    "specjax.engine.batch",
    "specjax.engine.programs",
    "specjax.engine.tracing",
    "pallas_kernels",
)
# The digest covers code from these places. Generated methods have the file name "<string>".
_INSTALLED = (
    "<",
    *(str(ROOT / package) for package in SOURCES),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
_DIGEST = hashlib.sha256
# Windows has other permissions, and shows every file as writable by all.
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH if hasattr(os, "getuid") else 0
_warning, _warned = threading.Lock(), set[str]()
_kept: list[Path] = []  # at most one folder, see `keep_programs`


def keep_programs(folder: Path | None) -> None:
    """Store compiled programs in `folder`, so that later processes can read them.

    This applies to engines that are built after the call. If JAX has a compilation cache, `folder`
    is ignored, and programs are stored inside the cache's folder. Otherwise, no programs are stored
    if `folder` is None.

    `folder` does not become JAX's compilation cache, because JAX would then also store the user's
    programs there.
    """
    _kept[:] = [] if folder is None else [folder]


def executables_folder() -> Path | None:
    """Return the folder in which compiled programs are stored; None if they are not stored.

    If JAX has a compilation cache, programs are stored in a folder within the cache's folder.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    folders = [Path(folder)] if folder else _kept
    return folders[0] / "programs" if folders else None


def open_executables(
    folder: Path, placement: Placement, model: Any, *origin: Any
) -> "Executables | None":
    """Open the store of compiled programs in `folder` for the model `model` (a `StepModel`).

    Return None if the model uses code that the files' digests do not cover, such as a user's own
    drafter or a replaced function. `origin` holds further values on which the programs depend.
    These values become part of the digests.
    """
    devices = list(placement.mesh.devices.flat)
    if (ids := [one.id for one in devices]) != list(range(len(ids))):  # a replica on later devices
        origin = (*origin, ids)
    described = "\n".join(map(repr, (placement, model, *origin)))
    is_known = " at 0x" not in described and all(map(_is_ours, _parts(model)))
    if not is_known or any(map(_is_patched, list(sys.modules))):
        return None
    return Executables(folder, described, devices)


class Executables:
    """The compiled programs of one engine, stored as files of a folder.

    `described` is a text with the values on which all of the engine's programs depend. The name of
    a program's file is a digest of this text, of versions and settings, and of the program's key.
    Programs that are read from files run on `devices`.

    Attributes:
        read: keys whose programs were read from the folder.
    """

    def __init__(self, folder: Path, described: str, devices: list[Any]):
        self.read: set[Any] = set()
        self._folder, self._devices = folder, devices
        self._origin = f"{_environment()}\n{described}"

    def get(self, key: Any, compile: Callable[[], Any]) -> Any:
        """Return the program of `key` from its file. Without a usable file, return `compile()`.

        The result of `compile()` is written to a file if possible.
        """
        path = self._path(key)
        if path is not None:
            try:
                if path.stat().st_mode & _OTHERS_WRITE:
                    raise ValueError("users other than its owner can write to it")
                program = _read(path, self._devices)
                self.read.add(key)
                with suppress(OSError):  # a read-only folder
                    os.utime(path)  # most recently used
                return program
            except FileNotFoundError:
                pass
            except OSError as error:
                _warn_once(f"{self._folder}: {error.strerror}; its programs are compiled again")
            except Exception as error:  # compile again, regardless of the cause
                log.warning("%s cannot be used, and is replaced: %s", path, error)
        before = _num_hits()
        program = compile()
        # XLA:CPU cannot fully serialise a program that came from JAX's own cache.
        if path is not None and _num_hits() == before:
            try:
                self._folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                self._folder.mkdir(mode=0o755, exist_ok=True)
                _write(path, program)
            except OSError as error:
                _warn_once(f"{self._folder}: {error.strerror}; compiled programs are not kept")
            except Exception as error:  # a program that only this process can run
                log.info("%s is not kept: %s", key, error)
        return program

    def has(self, key: Any) -> bool:
        """Return whether there is a file for the program of `key`."""
        path = self._path(key)
        return path is not None and path.exists()

    def _path(self, key: Any) -> Path | None:
        """Return the path of the file for the program of `key`.

        Return None if the program contains logits processors, whose code the digest does not cover.
        Also return None if users other than the owner can write to the folder or its parent.
        """
        if any(getattr(part, "processors", ()) for part in (key, getattr(key, "variant", None))):
            return None
        for folder in self._folder, self._folder.parent:  # its owner can replace `_folder`
            if (reason := _distrust(folder)) is not None:
                _warn_once(f"{folder}: {reason}; no compiled program is read from it or kept")
                return None
        name = _DIGEST(f"{self._origin}\n{_options()}\n{key!r}".encode()).hexdigest()
        return self._folder / f"{name}.program"


def _distrust(folder: Path) -> str | None:
    """Return the reason not to trust a folder; None if only its owner can write to it.

    Also return None for a missing folder, and for any folder on Windows.
    """
    if not hasattr(os, "getuid"):
        return None
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error.strerror)
    if found.st_mode & _OTHERS_WRITE:
        return (
            "users other than its owner can write to it, and their files would run code here "
            f"(if you trust what is there, chmod go-w {folder})"
        )
    return None


def _warn_once(message: str) -> None:
    with _warning:  # several threads compile
        if message not in _warned:
            _warned.add(message)
            log.warning(message)


def _read(path: Path, devices: list[Any]) -> Any:
    size, content = _DIGEST().digest_size, path.read_bytes()
    digest, content = content[:size], content[size:]
    if _DIGEST(content).digest() != digest:
        raise ValueError("it is incomplete")
    serialized = pickle.loads(content)
    return serialize_executable.deserialize_and_load(*serialized, execution_devices=devices)


def _write(path: Path, program: Any) -> None:
    content = pickle.dumps(serialize_executable.serialize(program))
    _make_room(path.parent, len(content))
    # The file is replaced at once: other processes see the whole file or none.
    file = tempfile.NamedTemporaryFile(dir=path.parent, delete=False)
    try:
        with file:
            file.write(_DIGEST(content).digest() + content)
        os.chmod(file.name, 0o644)  # readable by all, e.g. programs in a container image
        os.replace(file.name, path)
    except BaseException:
        os.unlink(file.name)
        raise


def _note(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _hits.count = _num_hits() + 1


def _num_hits() -> int:
    """Return the number of programs that this thread has read from JAX's compilation cache."""
    return getattr(_hits, "count", 0)


_hits = threading.local()
jax.monitoring.register_event_listener(_note)


@cache
def _environment() -> str:
    """Return a JSON text of the values on which the programs of all engines depend.

    These are versions, the device, the processor, compiler flags and a digest of our sources.
    """
    device = default_device()
    described = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "platform": getattr(device.client, "platform_version", device.platform),
        "device": device.device_kind,
        "processor": _processor(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "sources": sources_digest(),
        "kernels": [f"{name} {version(name)}" for name in packages_of_backend()],
    }
    return json.dumps(described, sort_keys=True)


def _options() -> list[tuple[str, Any]]:
    """Return JAX's options, except options about caches and debugging.

    They are the options of the current thread, which is the thread that compiles.
    """
    options = sorted(jax.config.values.items())
    return [pair for pair in options if "cache" not in pair[0] and "debug" not in pair[0]]


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value, and recursively the fields of a dataclass or the items of a tuple."""
    yield value
    held = ()
    if is_dataclass(value) and not isinstance(value, type):
        held = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, tuple):
        held = value
    for part in held:
        yield from _parts(part)


def _is_ours(value: Any) -> bool:
    """Return whether a value's class is a Python builtin, or from specjax's packages or NumPy."""
    return type(value).__module__.partition(".")[0] in (*SOURCES, "builtins", "numpy")


def _is_patched(module: str) -> bool:
    """Return whether a function of `module` was replaced by code outside of installed packages.

    The file names of compiled programs are digests, which do not cover such code. Return False for
    modules whose code is in no compiled program.
    """
    if not module.startswith(TRACED):
        return False
    owners = [sys.modules[module]]
    owners += [one for one in vars(owners[0]).values() if isinstance(one, type)]
    functions = [f for owner in owners if _is_within(owner) for f in vars(owner).values()]
    codes = [f.__code__.co_filename for f in functions if isinstance(f, FunctionType)]
    return any(not name.startswith(_INSTALLED) for name in codes)


def _is_within(owner: Any) -> bool:
    name = getattr(owner, "__module__", None) or getattr(owner, "__name__", "")
    return name.partition(".")[0] in SOURCES


def _processor() -> str:
    """Return a text with the CPU's model and features, on which XLA's instructions depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def sources_digest() -> str:
    """Return a digest of the Python files in the packages `SOURCES`.

    It covers the relative path and the contents of each file `*.py`, and no other files.
    """
    digest = _DIGEST()
    for package in SOURCES:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _make_room(folder: Path, num_bytes: int) -> None:
    """Delete the least recently used files until `num_bytes` more bytes fit in MAX_BYTES."""
    files = []
    for path in folder.glob("*.program"):
        try:
            found = path.stat()
        except FileNotFoundError:  # another process deleted it
            continue
        files.append((found.st_mtime, found.st_size, path))
    files.sort(reverse=True)
    for _, size, path in files:
        num_bytes += size
        if num_bytes > MAX_BYTES:
            path.unlink(missing_ok=True)
