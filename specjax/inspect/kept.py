"""Keeps compiled functions on disk, so that a function is compiled again only if it changed.

A compiled function is found by a digest of everything that it is compiled from:

- the StableHLO, with the names of its operations;
- XLA's options;
- the GPU;
- the versions of jax, its plugins, NVIDIA's packages and ptxas;
- the code in this package that reads XLA's dumps.
"""

import gzip
import hashlib
import importlib.metadata
import json
import os
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax.inspect.gpus import GPU
from specjax.inspect.resources import find_ptxas

_PACKAGES = "jax", "nvidia", "triton"  # beginnings of the names of packages that take part
_READERS = "compile.py", "kept.py", "resources.py"  # files of this package


@dataclass
class Kept:
    """A folder of compiled functions. Functions are read from it and added to it.

    Attributes:
        recompiles: whether to compile every function again, and replace its file in the folder.
        used: a pair (arguments, report) for each function that was found in the folder. With these
            arguments, `compile_functions` compiles only this function.
    """

    folder: Path
    recompiles: bool = False
    used: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def find(self, digest: str) -> dict[str, Any] | None:
        """Return the fields of the `Compiled` with this digest; None if it has to be compiled.

        Raises:
            ValueError: the file is damaged.
        """
        path = self._path(digest)
        if self.recompiles or not path.exists():
            return None
        try:
            return json.loads(gzip.decompress(path.read_bytes()))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise ValueError(f"{path} cannot be read ({error}); delete it") from error

    def put(self, digest: str, fields: Mapping[str, Any]) -> None:
        """Write the fields of a `Compiled` to the folder, atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self._path(digest).with_suffix(f".{os.getpid()}")
        part.write_bytes(gzip.compress(json.dumps(fields).encode(), mtime=0))
        part.replace(self._path(digest))

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.json.gz"


def digest_of(program: str, gpu: GPU, options: Mapping[str, Any], flags: Sequence[str]) -> str:
    """Return a digest of everything that a function is compiled from.

    Args:
        program: the StableHLO, with the names of operations and without their source locations.
        options: XLA's compiler options.
        flags: everything else that changes what is compiled or dumped.
    """
    facts = {
        "program": program,
        "gpu": gpu.target_config,
        "options": dict(options),
        "flags": list(flags),
        "versions": _versions(),
        "readers": [Path(__file__).with_name(name).read_text() for name in _READERS],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _versions() -> list[str]:
    found = {
        f"{one.name}=={one.version}"
        for one in importlib.metadata.distributions()
        if one.name.startswith(_PACKAGES)
    }
    ptxas = subprocess.run([find_ptxas(), "--version"], capture_output=True, text=True, check=True)
    return [*sorted(found), ptxas.stdout]
