"""Formats plain-text tables."""

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as aligned lines of text. The first row is the header.

    All columns but the first are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
