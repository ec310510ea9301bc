"""A report as a PNG with all charts."""

import math
from io import BytesIO
from textwrap import fill

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specjax.bench.reports.content import Chart, Content
from specjax.bench.reports.svg import MARKED

_COLUMNS, _WIDE, _HIGH = 3, 4.6, 3.2  # inches of a chart


def render(content: Content) -> bytes:
    """Return a PNG with all charts, the title, and the first note."""
    buffer = BytesIO()
    with rc_context({"text.parse_math": False, "text.usetex": False}):  # texts may have a "$"
        rows = max(1, math.ceil(len(content.charts) / _COLUMNS))
        size = _COLUMNS * _WIDE, rows * _HIGH + 1
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle("\n".join(fill(line, 120) for line in [content.title, *content.notes[:1]]))
        axes = figure.subplots(rows, _COLUMNS, squeeze=False).flat
        for one in list(axes)[len(content.charts) :]:
            one.remove()
        for one, chart in zip(figure.axes, content.charts, strict=True):
            _draw(one, chart)
        figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _draw(axes, chart: Chart) -> None:
    axes.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)
    xs = sorted({x for points in chart.series.values() for x, _ in points})
    width = 0.8 / len(chart.series)
    for number, (name, points) in enumerate(chart.series.items()):
        if chart.is_bars:
            shift = (number - (len(chart.series) - 1) / 2) * width
            at = [xs.index(x) + shift for x, _ in points]
            axes.bar(at, [y for _, y in points], 0.92 * width, label=name)
        else:
            mark = "o" if len(points) <= MARKED else ""
            axes.plot([x for x, _ in points], [y for _, y in points], marker=mark, label=name)
    if chart.is_bars:
        axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
        axes.set_xlim(-0.75, len(xs) - 0.25)
    axes.set_ylim(bottom=0)
    if len(chart.series) > 1:
        axes.legend(fontsize="small")
