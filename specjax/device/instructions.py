"""Finds the CPU's vendor and vector instructions, on which the speed of small products depends."""

import functools
from pathlib import Path

# Vector instructions by Linux's flag, widest first.
INSTRUCTIONS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sve": "SVE", "asimd": "NEON"}


@functools.cache
def cpu_instructions() -> str:
    """Return the widest vector instructions of the CPU, or "unknown" if Linux lists none."""
    flags = f"{cpuinfo('flags')} {cpuinfo('Features')}".split()
    return next((name for flag, name in INSTRUCTIONS.items() if flag in flags), "unknown")


@functools.cache
def cpu_vendor() -> str:
    """Return the CPU's vendor as Linux calls it, like "AuthenticAMD", or an empty text."""
    return cpuinfo("vendor_id")


def cpuinfo(field: str) -> str:
    """Return a field of /proc/cpuinfo for the first processor, or an empty text if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
