"""Line charts as SVG text, without a library: axes with round numbers, a line a series, colours from the page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 260
NUM_COLOURS = 6
# A dash leaves gaps through which an equal curve beneath can be seen. Five and six colours: 30 lines look different.
DASHES = ("none", "9 5", "3 4", "13 4 3 4", "5 9")
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 40


@dataclass(frozen=True, slots=True)
class Line:
    """One series: its name and its number in the legend, which gives it its look, and its points, sorted by x."""

    name: str
    number: int
    points: Sequence[tuple[float, float]]
    is_step: bool = False  # hold each value until the next point
    has_marks: bool = False  # show the points themselves

    @property
    def look(self) -> str:
        """CSS classes of its colour and its dashes."""
        return look(self.number)


def look(number: int) -> str:
    """CSS classes of line ``number``: ``c0``, ``c1``, … and ``d0``, ``d1``, …, defined by the page."""
    return f"c{number % NUM_COLOURS} d{number % len(DASHES)}"


class _Axis:
    """Maps values to pixels: linear from 0, or logarithmic over whole decades, with lower values at the first."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, is_log: bool = False) -> None:
        positive = [value for value in values if value > 0]
        self._is_log = is_log and bool(positive)
        if self._is_log:
            low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
            self.ticks = [10.0**power for power in range(low, max(high, low + 1) + 1)]
        else:
            self.ticks = _ticks(max(values, default=1.0))
        self._start = start
        self._scale = (end - start) / (self._at(self.ticks[-1]) - self._at(self.ticks[0]))

    def pixel(self, value: float) -> float:
        """Place of a value."""
        return self._start + (self._at(value) - self._at(self.ticks[0])) * self._scale

    def _at(self, value: float) -> float:
        return math.log10(max(value, self.ticks[0])) if self._is_log else value


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_title: str,
    y_title: str,
    y_max: float | None = None,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Draw lines over axes that start at 0, unless they are logarithmic. A screen reader says ``title``."""
    points = [point for line in lines for point in line.points]
    x_axis = _Axis([x for x, _ in points], _LEFT, WIDTH - _RIGHT, is_log=log_x)
    y_values = [y for _, y in points] if y_max is None else [y_max]
    y_axis = _Axis(y_values, HEIGHT - _BOTTOM, _TOP, is_log=log_y)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title>"
    ]
    for tick in y_axis.ticks:
        y = y_axis.pixel(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_axis.ticks:
        x = x_axis.pixel(tick)
        # The last one would stick out of the picture.
        anchor = "end" if tick == x_axis.ticks[-1] else "middle"
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="{anchor}">{tick:g}</text>'
        )
    parts.append(f'<text class="axis" x="{WIDTH - _RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_title)}</text>')
    parts.append(f'<text class="axis" x="{_LEFT}" y="{HEIGHT - 6}">{escape(y_title)} (up)</text>')
    for line in lines:
        path = _path(line, x_axis, y_axis)
        parts.append(f'<path class="line {line.look}" d="{path}"><title>{escape(line.name)}</title></path>')
        for x_value, y_value in line.points if line.has_marks else ():
            centre = f'cx="{x_axis.pixel(x_value):.1f}" cy="{y_axis.pixel(y_value):.1f}"'
            parts.append(f'<circle class="mark c{line.number % NUM_COLOURS}" {centre} r="2.5"/>')
    return "".join([*parts, "</svg>"])


def legend(names: Sequence[str]) -> str:
    """Show how the lines 0, 1, … look, and name them."""
    items = (
        f'<li><svg class="key" viewBox="0 0 40 6" aria-hidden="true"><path class="line {look(number)}" d="M0 3H40"/>'
        f"</svg>{escape(name)}</li>"
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _path(line: Line, x_axis: _Axis, y_axis: _Axis) -> str:
    commands: list[str] = []
    for number, (x_value, y_value) in enumerate(line.points):
        x, y = x_axis.pixel(x_value), y_axis.pixel(y_value)
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
