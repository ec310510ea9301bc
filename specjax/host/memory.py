"""Measures the memory available to this process, and its use of memory maps."""

import os
from pathlib import Path

_NO_LIMIT = 2**60  # cgroups version 1 write a huge number for "no limit"


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how many bytes the process can still allocate; None if unknown.

    If more is allocated, the kernel kills processes.
    """
    known = [_machine(root), *_cgroups(root)]
    return min((n for n in known if n is not None), default=None)


def _machine(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # unknown on this system
        return None


def _cgroups(root: Path) -> list[int]:
    """Return the number of bytes left under each cgroup limit of this process (version 1 or 2)."""
    left = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # A container may see its own group at the top, regardless of the path.
        for depth in range(len(parts) + 1):
            left += _left(top.joinpath(*parts[:depth]), *names)
    return left


def _left(group: Path, limit: str, usage: str, reclaimable: str) -> list[int]:
    allowed, used = _text(group / limit).strip(), _text(group / usage).strip()
    if not allowed.isdigit() or not used.isdigit() or int(allowed) >= _NO_LIMIT:
        return []
    counts = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    return [int(allowed) - int(used) + int(counts.get(reclaimable, 0))]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def maps_in_use(root: Path = Path("/")) -> float:
    """Return the fraction of the allowed memory maps that is in use; 0 if it is unknown."""
    limit = _text(root / "proc/sys/vm/max_map_count").strip()
    return _text(root / "proc/self/maps").count("\n") / int(limit) if limit.isdigit() else 0.0
