"""Bare tables: one row a line, in columns."""

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines, the first of them the header; columns but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
