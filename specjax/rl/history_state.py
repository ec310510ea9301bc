"""Reads the state of a `RolloutHistory` from arrays or a file, and checks it."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median_low
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from specjax.checks import is_integer

PROMPT_TAIL = 24  # tokens of the prompt before each output, so that an output's start is found
MAX_UPDATE = 2**62 - 1  # so that later updates also fit in 64 bits
# The order of the arrays in a file, after the identity.
_ARRAYS = "prompts", "updates", "samples", "seeds", "tail_lengths", "lengths", "tokens"


class StoredRollouts(NamedTuple):
    """The content of the state of a `RolloutHistory`.

    `rows` has the numbers of each rollout: its prompt's digest, update, sample index, seed, and
    the numbers of its tokens that are from the prompt and from the output. `tokens` has the tokens
    of all rollouts; the last ones can be missing.
    """

    identity: dict[str, Any]
    last_update: int
    rows: list[tuple[int, int, int, int, int, int]]
    tokens: list[int]

    @classmethod
    def of(cls, state: Any) -> "StoredRollouts":
        """Return the content of `state`.

        Raises:
            ValueError: `state` is not a result of `RolloutHistory.state`.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"it is a {type(state).__name__}, not a mapping of arrays")
        try:
            stored = np.asarray(state["identity"])
            arrays = {name: np.asarray(state[name]) for name in _ARRAYS}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(repr(error)) from error
        identity, last_update = _identity(stored)
        _check(arrays, last_update, identity.get("vocabulary"))
        *columns, tokens = (array.tolist() for array in arrays.values())
        return cls(identity, last_update, list(zip(*columns, strict=True)), tokens)


def checked_path(path: Any) -> Path:
    """Return the path of a history's file, with the user's folder in place of "~".

    Raises:
        ValueError: `path` is not a path, or names a user who does not exist.
    """
    if not isinstance(path, str | Path) or "\0" in str(path):
        raise ValueError(f"path={path!r:.60} must name a file, for example 'runs/history'")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"path={str(path)!r}: {error}; name another folder") from error


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file that `RolloutHistory.save` wrote. The tokens can be cut short.

    Raises:
        ValueError: another array was cut short, or the file has other contents.
        OSError: the file cannot be read.
    """
    names = "identity", *_ARRAYS[:-1]
    try:
        with open(path, "rb") as file:
            state = {n: np.lib.format.read_array(file, allow_pickle=False) for n in names}
            return state | {"tokens": _whole_items(file)}
    except OSError as error:  # the new error has the same type, which depends on the number
        raise OSError(
            error.errno,
            f"path={str(path)!r} cannot be read: {error.strerror or error}; name a file that "
            "RolloutHistory.save wrote",
        ) from error
    except Exception as error:  # NumPy parses headers as Python, which raises any
        raise ValueError(str(error)) from error


def _identity(stored: np.ndarray) -> tuple[dict[str, Any], int]:
    """Return the identity of the engines, and the last update. `stored` has the bytes of JSON.

    Raises:
        ValueError: `stored` does not have these.
    """
    if stored.ndim != 1 or stored.dtype != np.uint8:
        raise ValueError("identity is not a vector of bytes")
    try:
        identity = json.loads(stored.tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"identity is not JSON: {error}") from error
    if not isinstance(identity, dict):
        raise ValueError("identity is not a JSON object")
    update = identity.pop("update", None)
    if not is_integer(update) or not 0 <= update <= MAX_UPDATE:
        raise ValueError(f"update={update!r:.60} is not an integer in 0..{MAX_UPDATE}")
    return identity, update


def _check(arrays: Mapping[str, np.ndarray], last_update: int, vocab_size: Any) -> None:
    """Check the arrays of a history's state, named as in `_ARRAYS`.

    `vocab_size` limits the token ids if it is an integer.

    Raises:
        ValueError: an array is not a vector of integers, has another length than most arrays, or
            has a number out of range.
    """
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{name} is not a vector of integers")
    *columns, _ = _ARRAYS
    usual = median_low(len(arrays[name]) for name in columns)
    for name in columns:
        if len(arrays[name]) != usual:
            raise ValueError(
                f"{name} has {len(arrays[name])} numbers, but other arrays have {usual}"
            )
    most = 2**31 - 1
    bounds = {
        "prompts": (-(2**63), 2**63 - 1),
        "updates": (0, last_update),
        "samples": (0, most),
        "seeds": (0, 2**32 - 1),
        "tail_lengths": (0, PROMPT_TAIL),
        "lengths": (0, most),
        "tokens": (0, min(most, vocab_size - 1) if is_integer(vocab_size) else most),
    }
    for name, (low, high) in bounds.items():
        if np.any((arrays[name] < low) | (arrays[name] > high)):
            raise ValueError(f"{name} has a number outside of {low}..{high}")


def _whole_items(file: BinaryIO) -> np.ndarray:
    """Return the complete items of a vector in an .npy file, which may have been cut short."""
    np.lib.format.read_magic(file)
    _, _, dtype = np.lib.format.read_array_header_1_0(file)
    content = file.read()
    return np.frombuffer(content[: len(content) // dtype.itemsize * dtype.itemsize], dtype)
