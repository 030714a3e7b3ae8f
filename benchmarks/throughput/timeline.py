"""A timeline of workers as an SVG file: one lane for each worker, one bar for each stretch of computing."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_workers import COMPUTE_SPAN, Span

WIDTH, LEFT, LANE, TOP, GAP = 960, 90, 26, 34, 40
"""Pixels: of the page, of the lanes' names, of a lane, above a panel's lanes, below them (the scale)."""
COLORS = ("#3b6ea5", "#d9822b", "#4f9d69", "#8a5fa8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One run."""

    title: str
    spans: Sequence[Span]


def draw(panels: Sequence[Panel], path: Path, *, window_s: float) -> None:
    """Panels below each other, on one scale, each a stretch of `window_s` from the middle of its run."""
    stages = sorted({span.name for panel in panels for span in panel.spans if span.category == COMPUTE_SPAN})
    colors = dict(zip(stages, COLORS * len(stages), strict=False))
    y, parts = 0, []
    for panel in panels:
        drawn, height = _panel(panel, y, window_s, colors)
        parts.append(drawn)
        y += height
    path.parent.mkdir(parents=True, exist_ok=True)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        'font-family="sans-serif" font-size="12" fill="#222">\n<rect width="100%" height="100%" fill="#fff"/>\n'
    )
    path.write_text(head + "\n".join(parts) + "\n</svg>\n", encoding="utf-8")
    print(f"drawn to {path}")


def _panel(panel: Panel, y: int, window_s: float, colors: Mapping[str, str]) -> tuple[str, int]:
    """The panel's SVG and its height in pixels."""
    spans = [span for span in panel.spans if span.category == COMPUTE_SPAN]
    workers = sorted({span.worker for span in spans})
    first = min(span.start_s for span in spans)
    last = max(span.start_s + span.duration_s for span in spans)
    begin = max(first, (first + last - window_s) / 2)
    scale = (WIDTH - LEFT - 20) / window_s
    parts = [f'<text x="{LEFT}" y="{y + 20}" font-weight="bold">{html.escape(panel.title)}</text>']
    parts += [_legend(stage, color, i, y) for i, (stage, color) in enumerate(colors.items())]
    for lane, worker in enumerate(workers):
        middle = y + TOP + lane * LANE
        parts.append(f'<text x="{LEFT - 8}" y="{middle + 17}" text-anchor="end">{html.escape(worker)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{middle + 3}" width="{window_s * scale:.1f}" height="20" fill="#f1f1f1"/>')
        for span in spans:
            start = max(span.start_s, begin) - begin
            end = min(span.start_s + span.duration_s, begin + window_s) - begin
            if span.worker == worker and end > start:
                width = max(0.3, (end - start) * scale)
                parts.append(
                    f'<rect x="{LEFT + start * scale:.2f}" y="{middle + 3}" width="{width:.2f}" '
                    f'height="20" fill="{colors[span.name]}" stroke="#fff" stroke-width="0.3"/>'
                )
    bottom = y + TOP + len(workers) * LANE
    parts += [
        f'<text x="{LEFT + tick / 4 * window_s * scale:.1f}" y="{bottom + 16}" text-anchor="middle">'
        f"{tick / 4 * window_s * 1000:g} ms</text>"
        for tick in range(5)
    ]
    return "\n".join(parts), TOP + len(workers) * LANE + GAP


def _legend(stage: str, color: str, position: int, y: int) -> str:
    x = WIDTH - 110 * (position + 1)
    return (
        f'<rect x="{x}" y="{y + 10}" width="12" height="12" fill="{color}"/>'
        f'<text x="{x + 17}" y="{y + 20}">{html.escape(stage)}</text>'
    )
