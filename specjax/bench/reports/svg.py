"""Draws charts as SVG. The colours are CSS classes, which the page's style sheet defines."""

import math
from collections.abc import Sequence
from html import escape

from specjax.bench.reports.content import Chart, Points, shown

NUM_COLOURS = 8
_WIDTH, _HEIGHT = 440, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 428, 14, 216  # the box of the data
MARKED = 40  # lines of at most this many points have marks


def draw(chart: Chart) -> str:
    """Return a chart as an `svg` element. Each bar or point has a tooltip with its numbers."""
    series = {name: _finite(points) for name, points in chart.series.items()}
    every = [point for points in series.values() for point in points]
    highest = max([y for _, y in every], default=0) or 1
    lowest = min(0, *[y for _, y in every], 0)
    y_ticks = ticks(lowest, highest)
    bottom, top = min(lowest, y_ticks[0]), max(highest, y_ticks[-1])

    def place(y: float) -> float:
        return _BOTTOM - (y - bottom) / (top - bottom) * (_BOTTOM - _TOP)

    parts = [_y_tick(tick, place(tick)) for tick in y_ticks]
    parts += (_bars if chart.is_bars else _lines)(series, place)
    parts += [
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 6}" class="m">{escape(chart.x)}</text>',
        f'<text transform="translate(12 {(_TOP + _BOTTOM) / 2}) rotate(-90)" class="m">'
        f"{escape(chart.y)}</text>",
    ]
    label = escape(f"{chart.title}: {chart.y} by {chart.x}")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between `low` and `high`, at equal distances."""
    rough = (high - low) / 4 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _y_tick(tick: float, y: float) -> str:
    return (
        f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" class="grid"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="e">{tick:g}</text>'
    )


def _x_tick(text: str, x: float) -> str:
    return f'<text x="{x:.1f}" y="{_BOTTOM + 16}" class="m">{text}</text>'


def _bars(series: dict[str, list[tuple[float, float]]], place) -> list[str]:
    """Return the bars and the labels of the x axis. `place` converts a y to a coordinate."""
    xs = sorted({x for points in series.values() for x, _ in points})
    slot = (_RIGHT - _LEFT) / max(1, len(xs))
    width = min(40.0, 0.8 * slot / len(series))
    every = math.ceil(len(xs) / 12)  # labels that fit
    parts = [
        _x_tick(f"{x:g}", _LEFT + (i + 0.5) * slot) for i, x in enumerate(xs) if i % every == 0
    ]
    for number, (name, points) in enumerate(series.items()):
        for x, y in points:
            middle = _LEFT + (xs.index(x) + 0.5) * slot
            left = middle + (number - len(series) / 2) * width
            high, low = sorted([place(y), place(0)])
            parts.append(
                f'<rect x="{left:.1f}" y="{high:.1f}" width="{0.92 * width:.1f}" '
                f'height="{low - high:.1f}" class="f{number % NUM_COLOURS}">'
                f"{_tooltip(name, x, y)}</rect>"
            )
    return parts


def _lines(series: dict[str, list[tuple[float, float]]], place) -> list[str]:
    """Return a line for each series, and the x axis. Points are marked if there are few.

    `place` converts a y to a coordinate.
    """
    xs = [x for points in series.values() for x, _ in points]
    low, high = min([0, *xs]), max([*xs, 0]) or 1
    if high > low and min(xs, default=0) > 0.5 * high:  # far from 0
        low = min(xs) - 0.05 * (high - min(xs) or high)

    def across(x: float) -> float:
        return _LEFT + (x - low) / (high - low) * (_RIGHT - _LEFT)

    parts = [_x_tick(f"{tick:g}", across(tick)) for tick in ticks(low, high)]
    for number, (name, points) in enumerate(series.items()):
        colour = number % NUM_COLOURS
        path = _path([(across(x), place(y)) for x, y in points])
        parts.append(f'<polyline points="{path}" class="l{colour}"/>')
        if len(points) <= MARKED:
            parts += [
                f'<circle cx="{across(x):.1f}" cy="{place(y):.1f}" r="3" class="f{colour}">'
                f"{_tooltip(name, x, y)}</circle>"
                for x, y in points
            ]
    return parts


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _tooltip(name: str, x: float, y: float) -> str:
    return f"<title>{escape(f'{name} {shown(x)}: {shown(y)}'.strip())}</title>"
