"""Formats the report of `specjax info` as text."""

from collections.abc import Iterator, Mapping
from typing import Any

from specjax.inspect.gpus import GPUS


def answer(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the main results by name, for this device and for each kind of GPU.

    "fits" says whether the model fits, and "requests" for how many requests. "context" is the
    longest context in tokens.
    """
    here, length = report["this_device"], report["requests"]["max_model_len"]
    place, num_here = f"this {here['kind']}", here["max_full_length_requests"]
    fits = {place: num_here > 0}
    requests = {place: f"{num_here:,} of {length:,} tokens"}
    contexts = {place: length if num_here else 0}
    for name in GPUS:
        gpu = report[name]
        count = f"{gpu['num_devices']} " if "num_devices" in gpu else ""
        place = f"{count}{name.upper()}"
        fits[place] = gpu["longest_context"] > 0
        contexts[place] = gpu["longest_context"]
        batches = gpu["largest_batch"].items()
        requests[place] = " or ".join(
            f"{num:,} of {int(size.split()[0]):,} tokens" for size, num in batches
        )
    return {
        "fits": "; ".join(f"{place}: {as_text('', does)}" for place, does in fits.items()),
        "requests": "; ".join(f"{place}: {what}" for place, what in requests.items()),
        "context": "; ".join(f"{place}: {num:,} tokens" for place, num in contexts.items()),
    }


def as_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report as lines of text: the main results, then one section per key."""
    yield from (f"{name:10}{text}" for name, text in report["answer"].items())
    yield ""
    for section, values in report.items():
        if section == "answer":
            continue
        if values is None:
            continue
        yield section.replace("_", " ")
        for key, value in values.items():
            if value is not None:
                yield f"  {key.replace('_', ' '):30}{as_text(key, value)}"


def as_text(key: str, value: Any) -> str:
    """Return a value as text. If `key` contains "bytes", integers get readable units."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {as_text(key, item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and "bytes" in key:
        return as_size(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def as_size(num_bytes: int) -> str:
    """Return a number of bytes as text, in the largest unit with a value of at least 1."""
    for unit, size in ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:,} bytes"
