"""What a report shows, in any form: sentences, tables and charts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_MOST = 60  # characters of a setting in a line
Cell = str | int | float | None
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class ReportTable:
    """A table. The first column has the names of the rows.

    Attributes:
        is_aside: whether a reader rarely needs it: a page folds it, and other forms leave it out.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    is_aside: bool = False

    def without_empty_columns(self) -> "ReportTable":
        """Return the table without columns that have no cell in any row."""
        kept = [i for i in range(len(self.header)) if any(row[i] is not None for row in self.rows)]
        return replace(
            self,
            header=[self.header[i] for i in kept],
            rows=[[row[i] for i in kept] for row in self.rows],
        )


@dataclass(frozen=True)
class Chart:
    """A chart of (x, y) by the name of a series: lines, or bars side by side at each x."""

    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    is_bars: bool = False


@dataclass(frozen=True, kw_only=True)
class Content:
    """A whole report. `notes` are sentences. It drops tables, columns and charts without data."""

    title: str
    notes: Sequence[str]
    tables: Sequence[ReportTable]
    charts: Sequence[Chart]

    def __post_init__(self):
        tables = [one.without_empty_columns() for one in self.tables if one.rows]
        charts = [one for one in self.charts if any(one.series.values())]
        object.__setattr__(self, "tables", tables)
        object.__setattr__(self, "charts", charts)


def shown(cell: Cell) -> str:
    """Return a cell as text. Numbers below 0.1 keep three digits; nothing is an empty text."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.2f}" if abs(cell) >= 0.1 or cell == 0 else f"{cell:.3g}"
    return str(cell)


def in_words(value: object) -> str:
    """Return a setting as text: JSON unless it is a text."""
    return value if isinstance(value, str) else json.dumps(value)


def brief(value: object) -> str:
    """Return the same, cut where it is too long for a line; dots say so."""
    text = in_words(value)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
