"""Charts as SVG text, for self-contained pages.

Input: arrays.  Output: an <svg> element.  Long curves are drawn as means over some hundred intervals, with a note in
the chart; a value that is not finite is a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

COLOURS = ("#1f6fb4", "#e07b1a", "#2a8f62", "#8457b8", "#c4304b", "#7a8088")
WIDTH, HEIGHT = 440, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 18, 38, 34
MOST_POINTS = 300
Numbers = NDArray[np.float64]


def line_chart(title: str, steps: NDArray[np.int64], lines: Mapping[str, Numbers], *, from_zero: bool = False) -> str:
    """Chart of curves over the same steps."""
    if not lines or not len(steps):
        return _svg([_title(title), _note("nothing yet")])
    thin_steps, thin, is_thinned = _thinned(steps.astype(float), lines)
    finite = [values[np.isfinite(values)] for values in thin.values()]
    low, high = _span(np.concatenate([*finite, [0.0]] if from_zero else finite) if finite else np.zeros(0))
    ticks = nice_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = (float(thin_steps[0]), float(thin_steps[-1])) if len(thin_steps) else (0.0, 1.0)
    x = Scale(first, last if last > first else first + 1, _LEFT, WIDTH - _RIGHT)
    y = Scale(low, high, HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(title, ticks, y, nice_ticks(first, last, 6, whole=True), x, f"step{_mean_of(is_thinned)}")]
    for colour, values in zip(COLOURS, thin.values(), strict=False):
        parts += [_polyline(piece, colour, x, y) for piece in _pieces(thin_steps, values)]
    return _svg([*parts, _legend(list(thin))])


def histogram(title: str, how_often: Mapping[int, int], *, x_label: str, most_bars: int = 40) -> str:
    """A histogram, over single values or ranges of values."""
    if not how_often:
        return _svg([_title(title), _note("nothing yet")])
    values = np.array([*how_often])
    low, high = int(values.min()), int(values.max())
    width = max(1, math.ceil((high - low + 1) / most_bars))
    counts = np.bincount((values - low) // width, weights=[*how_often.values()]).astype(np.int64)
    ticks = nice_ticks(0, float(counts.max()))
    x, y = (
        Scale(low - 0.5, low + width * len(counts) - 0.5, _LEFT, WIDTH - _RIGHT),
        Scale(0, ticks[-1], HEIGHT - _BOTTOM, _TOP),
    )
    parts = [_frame(title, ticks, y, nice_ticks(low, high, 8, whole=True), x, x_label)]
    for place, count in enumerate(counts.tolist()):
        begin = low + place * width
        left, right, top = x(begin - 0.5), x(begin + width - 0.5), y(count)
        where = f"{begin}" if width == 1 else f"{begin} to {begin + width - 1}"
        parts.append(
            f'<rect x="{left + 0.5:.1f}" y="{top:.1f}" width="{max(0.5, right - left - 1):.1f}" '
            f'height="{HEIGHT - _BOTTOM - top:.1f}" fill="{COLOURS[0]}"><title>{where}: {count:,}</title></rect>'
        )
    return _svg(parts)


def stacked_chart(title: str, steps: NDArray[np.int64], layers: Mapping[str, Numbers]) -> str:
    """Chart of layers on top of each other; values that are not finite count as 0."""
    thin_steps, thin, is_thinned = _thinned(steps.astype(float), layers)
    if not len(thin_steps):
        return _svg([_title(title), _note("nothing yet")])
    stack = np.cumsum([np.nan_to_num(np.maximum(values, 0)) for values in thin.values()], axis=0)
    ticks = nice_ticks(0, float(np.quantile(stack[-1], 0.98)) or 1.0)  # clips a long step
    x = Scale(float(thin_steps[0]), float(max(thin_steps[-1], thin_steps[0] + 1)), _LEFT, WIDTH - _RIGHT)
    y = Scale(0, ticks[-1], HEIGHT - _BOTTOM, _TOP)
    parts = []
    below = np.zeros(len(thin_steps))
    for colour, above in zip(COLOURS, stack, strict=False):
        edge = [*zip(thin_steps, above, strict=True), *reversed([*zip(thin_steps, below, strict=True)])]
        points = " ".join(f"{x(a):.1f},{y(min(b, ticks[-1])):.1f}" for a, b in edge)
        parts.append(f'<polygon points="{points}" fill="{colour}" fill-opacity="0.85"/>')
        below = above
    x_ticks = nice_ticks(thin_steps[0], thin_steps[-1], 6, whole=True)
    frame = _frame(title, ticks, y, x_ticks, x, f"step{_mean_of(is_thinned)}")
    return _svg([frame, *parts, _legend(list(thin))])


def nice_ticks(low: float, high: float, most: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers that enclose low to high, in at most `most` + 1 intervals."""
    span = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / most))
    step = next(step * factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= most)
    step = max(1.0, round(step)) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """A number as short text, for an axis."""
    if abs(value) >= 10_000:
        return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k"
    return f"{value:.4g}"


class Scale:
    """Maps numbers to positions in the chart."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self._low, self._first = low, first
        self._factor = (last - first) / (high - low or 1.0)

    def __call__(self, value: float) -> float:
        """The position of a number."""
        return self._first + (value - self._low) * self._factor


def _thinned(steps: Numbers, lines: Mapping[str, Numbers]) -> tuple[Numbers, dict[str, Numbers], bool]:
    """Means over intervals, if there are more points than the chart has room for."""
    if len(steps) <= MOST_POINTS:
        return steps, dict(lines), False
    borders = np.linspace(0, len(steps), MOST_POINTS + 1).astype(int)
    stretches = [*pairwise(borders.tolist())]
    thin = {
        name: np.array(
            [
                values[a:b][np.isfinite(values[a:b])].mean() if np.isfinite(values[a:b]).any() else np.nan
                for a, b in stretches
            ]
        )
        for name, values in lines.items()
    }
    return np.array([steps[a:b].mean() for a, b in stretches]), thin, True


def _mean_of(is_thinned: bool) -> str:
    return " (means of stretches)" if is_thinned else ""


def _span(values: Numbers) -> tuple[float, float]:
    if not values.size:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if high > low:
        return low, high
    return (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)


def _pieces(steps: Numbers, values: Numbers) -> list[list[tuple[float, float]]]:
    """The pieces of a curve between its gaps."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        if math.isfinite(value):
            pieces[-1].append((step, value))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _polyline(points: Sequence[tuple[float, float]], colour: str, x: Scale, y: Scale) -> str:
    if len(points) == 1:
        return f'<circle cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}" r="2" fill="{colour}"/>'
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>'


def _frame(title: str, y_ticks: Sequence[float], y: Scale, x_ticks: Sequence[float], x: Scale, x_label: str) -> str:
    parts = [_title(title)]
    for tick in y_ticks:
        at = f"{y(tick):.1f}"
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at}" y2="{at}" class="grid"/>')
        parts.append(
            f'<text x="{_LEFT - 5}" y="{y(tick) + 3.5:.1f}" class="tick" text-anchor="end">{number(tick)}</text>'
        )
    for tick in x_ticks:
        if _LEFT - 1 <= x(tick) <= WIDTH - _RIGHT + 1:
            where = f'x="{x(tick):.1f}" y="{HEIGHT - _BOTTOM + 13}"'
            parts.append(f'<text {where} class="tick" text-anchor="middle">{number(tick)}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 5}" class="tick" text-anchor="middle">{escape(x_label)}</text>')
    return "".join(parts)


def _title(title: str) -> str:
    return f'<text x="6" y="14" class="title">{escape(title)}</text>'


def _note(text: str) -> str:
    return f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" class="tick" text-anchor="middle">{escape(text)}</text>'


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    parts, place = [], float(_LEFT)
    for colour, name in zip(COLOURS, names, strict=False):
        parts.append(f'<rect x="{place:.0f}" y="19" width="9" height="5" fill="{colour}"/>')
        parts.append(f'<text x="{place + 12:.0f}" y="25" class="tick">{escape(name)}</text>')
        place += 24 + 5.6 * len(name)
    return "".join(parts)


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" class="chart" role="img">{"".join(parts)}</svg>'
