"""The content of a report, independent of its form: sentences, tables and charts."""

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
        is_aside: whether the table is rarely needed. A page shows it collapsed, and other forms
            leave it out.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    is_aside: bool = False

    def without_empty_columns(self) -> "ReportTable":
        """Return the table without the columns in which all cells are None."""
        kept = [i for i in range(len(self.header)) if any(row[i] is not None for row in self.rows)]
        return replace(
            self,
            header=[self.header[i] for i in kept],
            rows=[[row[i] for i in kept] for row in self.rows],
        )


@dataclass(frozen=True)
class Chart:
    """A line chart or a bar chart of several series.

    Attributes:
        x, y: the labels of the axes.
        series: the points (x, y) of each series, by the name of the series.
        is_bars: whether each x has a group of bars, one for each series; otherwise lines.
    """

    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    is_bars: bool = False


@dataclass(frozen=True, kw_only=True)
class Content:
    """A whole report. Tables, columns and charts without data are removed.

    Attributes:
        notes: sentences about the result.
    """

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
    """Return a cell as text; None becomes an empty text.

    Floats have two decimals, or three significant digits if they are between -0.1 and 0.1.
    """
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.2f}" if abs(cell) >= 0.1 or cell == 0 else f"{cell:.3g}"
    return str(cell)


def in_words(value: object) -> str:
    """Return a setting as text. Strings are not changed, and other values become JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def brief(value: object) -> str:
    """Return a setting as text of at most 60 characters. A longer text is cut; it ends in "..."."""
    text = in_words(value)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
