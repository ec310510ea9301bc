"""A report as Markdown, with tables for a README."""

import re

from specjax.bench.reports.content import Content, ReportTable, shown

_SPECIAL = re.compile(r"([\\`*_\[\]|<>&#])")


def render(content: Content) -> bytes:
    """Return the report as Markdown, without charts."""
    tables = [_table(table) for table in content.tables if not table.is_aside]
    notes = "\n".join(f"- {_escaped(note)}" for note in content.notes)
    return "\n\n".join([f"### {_escaped(content.title)}", *tables, notes, ""]).encode()


def _table(table: ReportTable) -> str:
    rows = [[_escaped(shown(cell)) for cell in row] for row in table.rows]
    # Renderers need a header; the title takes the place of the first column's name.
    header = [f"**{_escaped(table.title)}**", *map(_escaped, table.header[1:])]
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
