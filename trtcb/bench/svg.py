"""Line charts as SVG text, without a library: axes with round numbers, a line a series, colours from the page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 40


@dataclass(frozen=True, slots=True)
class Line:
    """One series: its name in the legend, its colour (CSS class ``c0``, ``c1``, …) and its points, sorted by x."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]
    is_step: bool = False  # hold each value until the next point


def line_chart(title: str, lines: Sequence[Line], *, x_title: str, y_title: str, y_max: float | None = None) -> str:
    """Draw lines over axes that start at 0. ``title`` is also what a screen reader says."""
    points = [point for line in lines for point in line.points]
    x_ticks = _ticks(max((x for x, _ in points), default=1.0))
    y_ticks = _ticks(y_max or max((y for _, y in points), default=1.0))
    x_scale = (WIDTH - _LEFT - _RIGHT) / x_ticks[-1]
    y_scale = (HEIGHT - _TOP - _BOTTOM) / y_ticks[-1]
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title>"
    ]
    for tick in y_ticks:
        y = HEIGHT - _BOTTOM - tick * y_scale
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x = _LEFT + tick * x_scale
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text class="axis" x="{WIDTH - _RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_title)}</text>')
    parts.append(f'<text class="axis" x="{_LEFT}" y="{HEIGHT - 6}">{escape(y_title)} (up)</text>')
    for line in lines:
        path = _path(line, x_scale, y_scale)
        parts.append(f'<path class="line c{line.colour}" d="{path}"><title>{escape(line.name)}</title></path>')
    return "".join([*parts, "</svg>"])


def legend(names: Sequence[str]) -> str:
    """Name the colours ``c0``, ``c1``, … in order."""
    items = (f'<li><span class="key k{index}"></span>{escape(name)}</li>' for index, name in enumerate(names))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _path(line: Line, x_scale: float, y_scale: float) -> str:
    commands: list[str] = []
    for number, (x_value, y_value) in enumerate(line.points):
        x, y = _LEFT + x_value * x_scale, HEIGHT - _BOTTOM - y_value * y_scale
        if line.is_step and number:
            commands.append(f"H{x:.1f}V{y:.1f}")
        else:
            commands.append(f"{'L' if number else 'M'}{x:.1f} {y:.1f}")
    return "".join(commands)


def _ticks(top: float) -> list[float]:
    """Round numbers from 0 to at least ``top``, four to six of them."""
    if not (math.isfinite(top) and top > 0):
        top = 1.0
    raw = top / 4
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999999)
    count = math.ceil(top / step - 1e-9)
    return [round(number * step, 12) for number in range(count + 1)]
