"""Goodput: how many requests per second meet limits on their latencies."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.bench.traffic.record import Record

# The latencies that can be limited, in seconds. For itl, a request's longest gap counts.
LIMITED = {
    "ttft": lambda record: record.ttft,
    "tpot": lambda record: record.tpot,
    "itl": lambda record: max(record.gaps, default=0.0),
    "e2el": lambda record: record.latency,
}
_UNITS = {"ms": 1.0, "s": 1e3}
_LIMIT = re.compile(r"(?P<name>\w+):(?P<value>[0-9.]+)(?P<unit>[a-z]*)")


def read_limits(given: Sequence[str]) -> dict[str, float]:
    """Parse limits like ttft:200ms and e2el:2s. Return milliseconds by name.

    Raises:
        ValueError: a limit has no unit, or is malformed, unknown or given twice.
    """
    limits: dict[str, float] = {}
    for text in given:
        match = _LIMIT.fullmatch(text)
        name = match["name"] if match else ""
        try:
            value = float(match["value"]) if match else 0.0
        except ValueError:
            value = 0.0
        if match is None or value <= 0:
            raise ValueError(f"--goodput {text} must be like ttft:200ms, above 0")
        if name not in LIMITED:
            raise ValueError(f"--goodput {text} limits none of {', '.join(LIMITED)}")
        if match["unit"] not in _UNITS:
            raise ValueError(
                f"--goodput {text} needs a unit, {' or '.join(_UNITS)}, like {name}:"
                f"{match['value']}ms"
            )
        if name in limits:
            raise ValueError(f"--goodput limits {name} twice")
        limits[name] = value * _UNITS[match["unit"]]
    return limits


def goodput(
    limits: Mapping[str, float], complete: Sequence[Record], num_requests: int, duration: float
) -> dict[str, Any] | None:
    """Return how many requests meet all limits: per second, and as a share of all requests.

    The result also has the share of requests that meet each limit. A failed request meets no
    limit. Return None if there are no limits.
    """
    if not limits:
        return None
    within = {
        name: [(value := LIMITED[name](one)) is not None and 1e3 * value <= limit
               for one in complete]
        for name, limit in limits.items()
    }  # fmt: skip
    good = sum(all(one) for one in zip(*within.values(), strict=True))
    return {
        "limits_ms": dict(limits),
        "requests_per_second": good / duration if duration else 0.0,
        "share": good / num_requests if num_requests else 0.0,
        "share_by_limit": {
            name: sum(found) / num_requests if num_requests else 0.0
            for name, found in within.items()
        },
    }
