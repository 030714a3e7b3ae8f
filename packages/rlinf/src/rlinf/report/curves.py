"""Curves of metrics as inline SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rlinf.report.axes import number, percent, ticks
from rlinf.report.records import Series

WIDTH, HEIGHT = 380, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 36
NUM_COLORS = 7
"""Colours of the page for lines and bars."""
MAX_POINTS = 200
"""A longer series is drawn as means of equal intervals, with a band from their lowest to their highest value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One series of a plot."""

    label: str
    series: Series
    color: str
    """A CSS colour; of matplotlib in a picture."""
    has_marks: bool = False
    """Whether to mark the points; for evaluations, which are few."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One plot."""

    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    is_share: bool = False
    """Whether values are shares from 0 to 1, shown as percent."""
    axis: str = "training steps"
    """Label of the x axis."""

    def text(self, value: float) -> str:
        return percent(value) if self.is_share else number(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    step: float
    mean: float
    low: float
    high: float


def draw(curve: Curve) -> str:
    """Draws the plot as HTML; empty if no line has a point."""
    lines = [line for line in curve.lines if len(line.series)]
    if not lines:
        return ""
    points = [_stretches(line.series) for line in lines]
    box = _Box(points, is_share=curve.is_share)
    drawn = [part for line, row in zip(lines, points, strict=True) for part in _draw_line(line, row, box)]
    unit = f' <span class="unit">{escape(curve.unit)}</span>' if curve.unit else ""
    return "".join(
        [
            f'<figure class="curve"><figcaption>{escape(curve.title)}{unit}{_last_values(curve, lines)}</figcaption>',
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{curve.title} over {curve.axis}")}"',
            f' data-curve="{escape(_for_hover(curve, lines, points, box))}">',
            *_axes(box, curve),
            *drawn,
            '<g class="cursor"></g></svg></figure>',
        ]
    )


class _Box:
    """Maps steps and values to the plot's coordinates."""

    def __init__(self, points: Sequence[Sequence[_Point]], *, is_share: bool) -> None:
        steps = [point.step for row in points for point in row]
        low = min(point.low for row in points for point in row)
        high = max(point.high for row in points for point in row)
        self.first, self.last = min(steps), max(max(steps), min(steps) + 1)
        self.low, self.high = _value_range(low, high, is_share=is_share)

    def x(self, step: float) -> float:
        return round(LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM), 1)


def _value_range(low: float, high: float, *, is_share: bool) -> tuple[float, float]:
    if is_share and low >= 0 and high <= 1:
        return 0.0, 1.0 if high > 0.5 else max(0.1, math.ceil(high * 11) / 10)
    if low == high:
        margin = abs(low) * 0.1 or 1.0
    else:
        margin = (high - low) * 0.06
    bottom = 0.0 if 0 <= low < 0.4 * high else low - margin
    return bottom, high + margin


def _stretches(series: Series) -> list[_Point]:
    size = math.ceil(len(series) / MAX_POINTS)
    points = []
    for start in range(0, len(series), size):
        steps, values = series.steps[start : start + size], series.values[start : start + size]
        points.append(
            _Point(step=sum(steps) / len(steps), mean=sum(values) / len(values), low=min(values), high=max(values))
        )
    return points


def _draw_line(line: Line, points: Sequence[_Point], box: _Box) -> list[str]:
    parts = []
    if any(point.low < point.high for point in points):
        upper = [f"{box.x(point.step)},{box.y(point.high)}" for point in points]
        lower = [f"{box.x(point.step)},{box.y(point.low)}" for point in reversed(points)]
        parts.append(f'<polygon class="band" fill="{line.color}" points="{" ".join([*upper, *lower])}"/>')
    path = " ".join(f"{box.x(point.step)},{box.y(point.mean)}" for point in points)
    parts.append(f'<polyline class="line" stroke="{line.color}" points="{path}"/>')
    if line.has_marks or len(points) == 1:
        parts += [
            f'<circle class="mark" fill="{line.color}" cx="{box.x(point.step)}" cy="{box.y(point.mean)}" r="3"/>'
            for point in points
        ]
    return parts


def _axes(box: _Box, curve: Curve) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for value in ticks(box.low, box.high, max_ticks=5):
        y = box.y(value)
        text = f"{value * 100:.0f} %" if curve.is_share else number(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + 3.5:.1f}">{text}</text>')
    for step in ticks(box.first, box.last, max_ticks=6, whole=True):
        x = box.x(step)
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick" text-anchor="middle" x="{x}" y="{bottom + 15}">{number(step)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" text-anchor="middle" x="{middle}" y="{HEIGHT - 4}">{escape(curve.axis)}</text>')
    return parts


def _last_values(curve: Curve, lines: Sequence[Line]) -> str:
    entries = []
    for line in lines:
        label = f"{escape(line.label)} " if len(lines) > 1 else ""
        text = curve.text(line.series.values[-1])
        entries.append(f'<span class="last"><i style="background:{line.color}"></i>{label}<b>{text}</b></span>')
    return f'<span class="lasts">{"".join(entries)}</span>'


def _for_hover(curve: Curve, lines: Sequence[Line], points: Sequence[Sequence[_Point]], box: _Box) -> str:
    """Returns the data that page.js needs to show the values under the pointer."""
    rows = [
        [[box.x(point.step), box.y(point.mean), number(point.step), curve.text(point.mean)] for point in row]
        for row in points
    ]
    described = [
        {"label": line.label, "color": line.color, "points": row} for line, row in zip(lines, rows, strict=True)
    ]
    content = {"top": TOP, "bottom": HEIGHT - BOTTOM, "lines": described}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))
