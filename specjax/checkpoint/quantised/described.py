"""Describes the tensors of a quantised checkpoint from its config alone, without weights."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.format import Format

_REGEX = "re:"


@dataclass(frozen=True)
class Described:
    """A tensor without a file; see `Readable`. If `values` is None, all values are 0."""

    dtype: np.dtype
    shape: tuple[int, ...]
    values: Any = None
    path: Path = Path("config.json")

    def read(self) -> np.ndarray:
        """Return the tensor."""
        return np.zeros(self.shape, self.dtype) if self.values is None else self.values


def described(files: TensorFiles, form: Format, names: Iterable[str]) -> TensorFiles:
    """Return `files`, with each matrix in `names` replaced by the tensors of its quantised form.

    The method `form.stored` returns the tensors of one matrix, or None if the matrix stays plain.
    `files` contains only `Described` tensors.
    """
    tensors = dict(files.tensors)
    for name in names:
        plain = tensors.pop(name)
        tensors |= form.stored(name, plain.shape, plain.dtype) or {name: plain}
    return replace(files, tensors=tensors)


def tensor(dtype: Any, *shape: int, values: Any = None) -> Described:
    """Return a `Described` tensor with `values`. If `values` is None, all values are 0."""
    if values is None:
        return Described(np.dtype(dtype), shape)
    array = np.asarray(values, dtype)
    return Described(array.dtype, array.shape, array)


def is_named(name: str, patterns: Collection[Any] | None) -> bool:
    """Return whether one of a config's `patterns` names the matrix `name`, or a module around it.

    A pattern is "re:" and a regular expression, a name with wildcards, a whole name, or a part of a
    name, such as "lm_head" or "mlp.gate". The prefixes `model.` and `language_model.` are ignored,
    because not all configs have them.
    """
    own = _short(name.removesuffix(".weight"))
    return any(_is_like(own, str(pattern)) for pattern in patterns or ())


def of_config(config: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    """Return the names or patterns that a config lists in any of `fields`."""
    lists = [config.get(field) for field in fields]
    return tuple(str(one) for found in lists if isinstance(found, list) for one in found)


def _is_like(name: str, pattern: str) -> bool:
    if pattern.startswith(_REGEX):
        try:
            found = re.compile(pattern.removeprefix(_REGEX))
        except re.error:
            return False
        return any(found.match(prefix + name) for prefix in ("", "model.", "model.language_model."))
    pattern = _short(pattern)
    return fnmatchcase(name, pattern) or f".{pattern}." in f".{name}."


def _short(name: str) -> str:
    return name.replace("language_model.", "").removeprefix("model.")
