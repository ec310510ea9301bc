"""A report as one HTML page. The page has no scripts, and loads nothing from a network."""

from html import escape

from specjax.bench.reports.content import Cell, Chart, Content, ReportTable, shown
from specjax.bench.reports.svg import NUM_COLOURS, draw

_LIGHT = "#2563eb", "#ea7317", "#15935a", "#c026a3", "#7c5cff", "#b08900", "#0d94a8", "#d43a3a"
_DARK = "#7aa7ff", "#ffa559", "#4fd08e", "#f07ad8", "#a996ff", "#e3c04a", "#4cc9dc", "#ff8080"
_STYLE = """
:root { color-scheme: light dark; --page: #fbfbfd; --card: #fff; --text: #1c1e26; --soft: #5d6270;
  --line: #e3e5ec; LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #14151a; --card: #1d1f27; --text: #e9eaf0;
  --soft: #a0a5b4; --line: #31343f; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem; max-width: 72rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; margin: 0 0 .5rem; } h2 { font-size: 1rem; margin: 0 0 .5rem; }
ul { margin: 0 0 1.25rem; padding-left: 1.1rem; color: var(--soft); }
main { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem),
  1fr)); grid-auto-flow: dense; align-items: start; }
section, details { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .9rem 1rem; min-width: 0; }
.wide { grid-column: 1 / -1; } .scroll { overflow-x: auto; } summary { cursor: pointer; }
table { border-collapse: collapse; width: 100%; overflow-wrap: normal; }
.aside table { overflow-wrap: anywhere; } .aside td { text-align: left; }
th, td { padding: .25rem .6rem; text-align: right; border-top: 1px solid var(--line);
  vertical-align: top; font-variant-numeric: tabular-nums; }
thead th { border: 0; color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; padding-left: 0; min-width: 8rem; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
.m { text-anchor: middle; } .e { text-anchor: end; } .grid { stroke: var(--line); }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
.legend { margin: 0 0 .3rem; color: var(--soft); } .legend b { margin-right: .3rem; }
COLOURS"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(content: Content) -> bytes:
    """Return the report as HTML."""
    tables = [table for table in content.tables if not table.is_aside]
    parts = [*map(_table, tables[:1]), *map(_chart, content.charts), *map(_table, tables[1:])]
    parts += [_aside(table) for table in content.tables if table.is_aside]
    notes = "".join(f"<li>{escape(note)}</li>" for note in content.notes)
    page = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(content.title)}</title>\n<style>{_style()}</style>\n"
        f"<h1>{escape(content.title)}</h1>\n<ul>{notes}</ul>\n<main>\n"
    )
    return (page + "\n".join(parts) + "\n</main>\n</html>\n").encode()


def _style() -> str:
    """Return the style sheet. Class f<i> fills with colour i, and class l<i> draws lines in it."""
    light, dark = (
        " ".join(f"--c{i}: {colour};" for i, colour in enumerate(colours))
        for colours in (_LIGHT, _DARK)
    )
    classes = "\n".join(
        f".f{i} {{ fill: var(--c{i}); color: var(--c{i}); }} .l{i} {{ stroke: var(--c{i}); }}"
        for i in range(NUM_COLOURS)
    )
    return _STYLE.replace("LIGHT", light).replace("DARK", dark).replace("COLOURS", classes)


def _chart(chart: Chart) -> str:
    names = [
        f'<b class="f{i % NUM_COLOURS}">&#9632;</b>{escape(name)}&ensp;'
        for i, name in enumerate(chart.series)
    ]
    legend = f'<p class="legend">{"".join(names)}</p>' if len(names) > 1 else ""
    return f"<section><h2>{escape(chart.title)}</h2>{legend}{draw(chart)}</section>"


def _table(table: ReportTable) -> str:
    wide = ' class="wide"' if len(table.header) > 4 else ""
    return f"<section{wide}><h2>{escape(table.title)}</h2>{_rows(table)}</section>"


def _aside(table: ReportTable) -> str:
    title = escape(table.title)
    return f'<details class="wide aside"><summary>{title}</summary>{_rows(table)}</details>'


def _rows(table: ReportTable) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.header)
    head = f"<thead><tr>{head}</tr></thead>" if any(table.header) else ""
    rows = ("".join(map(_cell, row)) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    """Return a table cell. A number also has its exact value, in a `data` element."""
    if isinstance(cell, int | float):
        return f'<td><data value="{cell!r}">{shown(cell)}</data></td>'
    return f"<td>{escape(shown(cell))}</td>"
