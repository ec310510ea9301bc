"""Keeps compiled functions on disk, so that a function is compiled again only if it changed.

A compiled function is found by a digest of everything that it is compiled from:

- the StableHLO, with the names of its operations;
- XLA's options;
- the GPU;
- the versions of jax, its plugins, Triton, NVIDIA's packages and ptxas;
- the code in this package that reads XLA's dumps, without comments and docstrings.
"""

import ast
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax.inspect.gpus import GPU
from specjax.inspect.resources import find_ptxas

_PACKAGES = re.compile(r"jax|jaxlib|triton|(jax|nvidia)[-_].*")  # that take part in compiling
_READERS = "compile.py", "resources.py"  # files of this package
_NOT_COMPARED = "seconds", "is_kept"  # fields of a `Compiled`


@dataclass
class Kept:
    """A folder of compiled functions. Functions are read from it and added to it.

    Attributes:
        recompiles: whether to compile every function again, and compare it with its file.
        used: a pair (arguments, report) for each function that was found in the folder. With these
            arguments, `compile_functions` compiles only this function.
        num_compiled: how many functions were compiled instead of being read from the folder.
    """

    folder: Path
    recompiles: bool = False
    num_compiled: int = 0
    used: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def find(self, digest: str) -> dict[str, Any] | None:
        """Return the fields of the `Compiled` with this digest; None if it has to be compiled.

        Raises:
            ValueError: the file is damaged.
        """
        path = self._path(digest)
        if self.recompiles or not path.exists():
            return None
        path.touch()  # the time of its last use
        return _read(path)

    def put(self, digest: str, fields: Mapping[str, Any]) -> None:
        """Write the fields of a `Compiled` to the folder, atomically.

        Raises:
            ValueError: the folder has other fields for this digest.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path, text = self._path(digest), json.dumps(fields)
        if path.exists() and (names := differing(_read(path), json.loads(text))):
            raise ValueError(
                f"{path} has other {names} than the same function has when it is compiled again; "
                "delete the file, and find what its digest leaves out"
            )
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.replace(path)

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of fields in which two compilations of one function differ.

    Durations and `is_kept` are not compared.
    """
    return [name for name in one if name not in _NOT_COMPARED and one[name] != other[name]]


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it") from error


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
        "readers": [_code_of(Path(__file__).with_name(name)) for name in _READERS],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _versions() -> list[str]:
    found = {
        f"{one.name}=={one.version}"
        for one in importlib.metadata.distributions()
        if _PACKAGES.fullmatch(one.name)
    }
    ptxas = subprocess.run([find_ptxas(), "--version"], capture_output=True, text=True, check=True)
    return [*sorted(found), ptxas.stdout]


def _code_of(file: Path) -> str:
    """Return the code of a file without its comments and docstrings."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            del node.body[: ast.get_docstring(node) is not None]
    return ast.dump(tree)
