"""The number formats to which unquantised weights can be quantised while they are loaded.

This module imports nothing slow, so that --help is fast.
"""

from typing import NamedTuple


class Bits(NamedTuple):
    """A number format. A quantised weight is a number in this format, times a scale."""

    dtype: str  # of the numbers
    least: int
    largest: int
    group: int | None = None  # the number of inputs that share a scale; None for all


BITS = {
    "fp8": Bits("float8_e4m3fn", -448, 448),
    "int8": Bits("int8", -128, 127),
    "int4": Bits("int4", -8, 7, 128),
}


def name_of(dtype: str) -> str:
    """Return the key of `BITS` whose numbers have this dtype."""
    return next(name for name, bits in BITS.items() if bits.dtype == dtype)
