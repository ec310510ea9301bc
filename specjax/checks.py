"""Checks the values of settings. Errors name the setting, its value and the valid values."""

import json
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

NEAR = 0.75  # minimum similarity of a suggested name
# A step shape may be this many times as large as any step, and the rest is padding. Exact mode pads
# a single request to 16; much more would take memory and time for nothing.
MAX_PADDING = 16
# Packages whose frames may lie between a warning and the line that caused it.
_OWN = "specjax", "pallas_kernels", "contextlib", "functools"


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return the end of an error message: a question with the known name most similar to `name`.

    The text is empty if no known name is similar.
    """
    near = get_close_matches(str(name), list(known), 1, NEAR)
    return f"; did you mean {near[0]!r}?" if near else ""


def read_object(source: str, text: str) -> dict[str, Any]:
    """Parse the JSON object `text`. Errors name its source, for example an option."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON ({error}): {text}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source} must be a JSON object, got {text}")
    return value


def warn(message: str) -> None:
    """Show a warning at the line of code that called this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_own(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level + 1)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in _OWN


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} is not supported; choose one of {', '.join(choices)}")


def check_flags(**values: Any) -> None:
    """Refuse values that are not True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False")


def check_multiple(**pair: int) -> None:
    """Refuse a pair of named numbers if the first is not a multiple of the second."""
    (name, number), (other, unit) = pair.items()
    if rest := number % unit:
        near = " or ".join(str(x) for x in (number - rest, number - rest + unit) if x)
        raise ValueError(f"{name}={number} must be a multiple of {other}={unit}; {near} would be")


def check_positive(**values: int) -> None:
    """Refuse values that are not integers of at least 1."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be an integer of at least 1")


def check_count(**values: int) -> None:
    """Refuse values that are not integers of at least 0."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name}={value!r} must be an integer of at least 0")


def check_seed(**values: int) -> None:
    """Refuse values that are not signed or unsigned integers of 64 bits."""
    for name, value in values.items():
        if not is_integer(value) or not -(2**63) <= value < 2**64:
            raise ValueError(f"{name}={value!r} must be an integer of 64 bits, -2**63..2**64 - 1")


def is_number(value: Any) -> bool:
    """Return whether the value is a real Python or NumPy number, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Return whether the value is a Python or NumPy integer, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def parse_table(table: Any, max_drafts: int) -> tuple[tuple[int, int, int], ...]:
    """Parse a table [[lo, hi, K], ...] of numbers of drafts by batch size, as in vLLM.

    An entry means K drafts if lo to hi requests decode together. Numbers of requests between two
    entries, or beyond the last entry, have the K of the entry before them.

    Raises:
        ValueError: an entry is malformed; the message names it.
    """
    name = "speculative_config.num_speculative_tokens_per_batch_size"
    entries = _listed(table)
    if not entries:
        raise ValueError(f"{name}={table!r} must list entries [lo, hi, K], like [[1, 16, 3]]")
    parsed: list[tuple[int, int, int]] = []
    for i, entry in enumerate(entries):
        where, numbers = f"{name}[{i}]={entry!r}", _listed(entry)
        if len(numbers) != 3 or not all(map(is_integer, numbers)):
            raise ValueError(f"{where} must be three integers: first and last batch size, and K")
        lo, hi, k = map(int, numbers)
        if lo < 1 or hi < lo:
            raise ValueError(f"{where} must have 1 <= lo <= hi, a range of batch sizes")
        if not parsed and lo != 1:
            raise ValueError(f"{where} must begin at batch size 1, as it is the first")
        if parsed and lo <= parsed[-1][1]:
            raise ValueError(
                f"{where} must begin above batch size {parsed[-1][1]}, where the previous entry "
                "ends; order entries by size, without overlaps"
            )
        if not 0 <= k <= max_drafts:
            raise ValueError(
                f"{where} must have a K in 0..{max_drafts}, num_speculative_tokens; lower K or "
                "raise that"
            )
        parsed.append((lo, hi, k))
    return tuple(parsed)


def parse_batches(given: Any, max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes of `decode_batches` in ascending order.

    Raises:
        ValueError: an entry is not a batch size, or is far larger than `max_num_seqs`.
    """
    if not (sizes := _listed(given)):
        raise ValueError(f"decode_batches={given!r} must be batch sizes, as (1, 4, 16)")
    check_positive(**{f"decode_batches[{i}]": size for i, size in enumerate(sizes)})
    most = MAX_PADDING * max_num_seqs
    for i, size in enumerate(sizes):
        if size > most:
            raise ValueError(
                f"decode_batches[{i}]={size} must be at most {most}, {MAX_PADDING} times "
                f"max_num_seqs={max_num_seqs}: the rest of a round is padding; lower it, or raise "
                "max_num_seqs"
            )
    return tuple(sorted(set(sizes)))


def parse_shapes(given: Any, possible: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs (batch, width) of `prefill_shapes` in ascending order of width.

    `possible` is the maximum number of prompt tokens in a step.

    Raises:
        ValueError: an entry is not a (batch, width) pair, or holds far more tokens than `possible`.
    """
    shapes = _listed(given)
    if not shapes or not all(isinstance(s, Sequence) and len(s) == 2 for s in shapes):
        raise ValueError(
            f"prefill_shapes={given!r} must be pairs (batch, width), as ((1, 512), (4, 128))"
        )
    for i, (batch, width) in enumerate(shapes):
        check_positive(**{f"prefill_shapes[{i}][0]": batch, f"prefill_shapes[{i}][1]": width})
        if batch * width > (most := MAX_PADDING * possible):
            raise ValueError(
                f"prefill_shapes[{i}]={(batch, width)} must hold at most {most} tokens, "
                f"{MAX_PADDING} times the {possible} prompt tokens that a step may have: the rest "
                "is padding; lower it, or raise max_num_batched_tokens, max_num_seqs or "
                "max_model_len"
            )
    return tuple(sorted({(batch, width) for batch, width in shapes}, key=lambda s: s[::-1]))


def _listed(value: Any) -> list[Any]:
    """Return the items of a list, tuple or array; an empty list for anything else."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    is_scalar = getattr(value, "ndim", 1) == 0  # an array without dimensions has no items
    return list(value) if is_list and not is_scalar else []
