"""The timeline: which stage computed where and when in the last whole steps, drawn from the trace."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rlinf.report.axes import number, percent, seconds, ticks
from rlinf.report.records import RunRecords, SpanRecord

NUM_STEPS = 3
"""Steps drawn, if there are so many."""
NUM_STEPS_SEARCHED = 8
"""The newest steps, among which the drawn ones are looked for; of the others no span is held in memory."""
OVERLAP = 0.2
"""Part of a step by which the next one may seem to begin too early."""
MAX_SPANS = 4000
"""More than these are not drawn: fewer steps are."""

WIDTH = 1120
LABEL_WIDTH = 150
TOP, BOTTOM = 22, 38
ROW_HEIGHT, BAR_HEIGHT, THIN_HEIGHT = 28, 20, 4
MERGE_PIXELS = 0.5
"""Spans of one stage on one row that lie closer together are drawn as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The stretch of the run that is drawn."""

    steps: tuple[tuple[int, float, float], ...]
    """(step, start, end), seconds from the run's start; the steps follow one another."""
    spans: tuple[SpanRecord, ...]

    @property
    def start_s(self) -> float:
        return self.steps[0][1]

    @property
    def end_s(self) -> float:
        return self.steps[-1][2]

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One line of bars."""

    label: str
    note: str
    spans: tuple[SpanRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bar:
    """Spans of one name that are drawn as one rectangle."""

    spans: tuple[SpanRecord, ...]

    @property
    def start_s(self) -> float:
        return self.spans[0].start_s

    @property
    def end_s(self) -> float:
        return max(span.end_s for span in self.spans)


def last_steps(records: RunRecords) -> Window | None:
    """The last whole training steps that the trace holds; None if it holds none.

    A step ends with the last span that bears its number, and began as long before as the metrics say it took: an
    evaluation or a warm start in front of it bears the same number.
    """
    timed = [(row["step"], row["metrics"].get("time/step_s")) for row in records.metrics]
    duration_s = {step: float(step_s) for step, step_s in timed[-NUM_STEPS_SEARCHED:] if step_s}
    spans = [span for span in records.spans() if span.step in duration_s]
    if any(span.phase == "train" for span in spans):
        spans = [span for span in spans if span.phase == "train"]
    by_step: dict[int, list[SpanRecord]] = defaultdict(list)
    for span in spans:
        by_step[span.step or 0].append(span)
    chosen: list[tuple[int, float, float]] = []
    kept: list[SpanRecord] = []
    for step in sorted(by_step, reverse=True)[:NUM_STEPS]:
        step_s = duration_s[step]
        end_s = max(span.end_s for span in by_step[step])
        start_s = end_s - step_s
        inside = [span for span in by_step[step] if (span.start_s + span.end_s) / 2 > start_s]
        if chosen:
            later_step, later_start_s, later_end_s = chosen[0]
            # The driver's share of a step lies after its last span, so the steps' stretches overlap a little.
            follows = step == later_step - 1 and end_s <= later_start_s + OVERLAP * step_s
            if not follows or len(kept) + len(inside) > MAX_SPANS:
                break
            chosen[0] = (later_step, max(later_start_s, end_s), later_end_s)
        chosen.insert(0, (step, start_s, end_s))
        kept += inside
    return Window(steps=tuple(chosen), spans=tuple(kept)) if chosen else None


def busy_shares(window: Window) -> dict[str, float]:
    """Device -> share of the window in which a stage computed on it."""
    return {
        lane: _covered_s([s for s in spans if s.category == "stage"], window) / window.duration_s
        for lane, spans in _by_lane(window).items()
        if spans[0].is_device
    }


def draw_timeline(window: Window, colors: Mapping[str, str]) -> str:
    """The drawing as HTML.

    Args:
        colors: stage -> CSS colour.
    """
    rows = _rows(window)
    height = TOP + len(rows) * ROW_HEIGHT + BOTTOM
    scale = (WIDTH - LABEL_WIDTH - 10) / window.duration_s
    parts = [
        f'<div class="wide"><svg class="timeline" data-timeline viewBox="0 0 {WIDTH} {height}" role="img"',
        ' aria-label="Timeline of stages on devices">',
        *_frame(window, scale, height),
    ]
    for i, row in enumerate(rows):
        y = TOP + i * ROW_HEIGHT
        parts += _draw_row(row, y, window, scale, colors)
    parts.append("</svg></div>")
    return "".join(parts)


# -- rows --------------------------------------------------------------------------------------------------------------


def _by_lane(window: Window) -> dict[str, list[SpanRecord]]:
    """Devices first, then workers without one, each in natural order (`cpu:2` before `cpu:10`)."""
    lanes: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in sorted(window.spans, key=lambda span: span.start_s):
        for lane in span.lanes:
            lanes[lane].append(span)
    return dict(sorted(lanes.items(), key=lambda kv: (not kv[1][0].is_device, _natural(kv[0]))))


def _rows(window: Window) -> list[_Row]:
    """One row a lane; one a worker of the lane where workers compute on it at once."""
    busy = busy_shares(window)
    rows = []
    for lane, spans in _by_lane(window).items():
        note = f"{busy[lane]:.0%} busy" if lane in busy else ""
        computing = [span for span in spans if span.category == "stage"]
        workers = list(dict.fromkeys(span.worker for span in (*computing, *spans)))  # as they begin to compute
        if len(workers) == 1 or not _overlap(computing):
            rows.append(_Row(label=lane, note=note, spans=tuple(spans)))
            continue
        for i, worker in enumerate(workers):
            own = tuple(span for span in spans if span.worker == worker)
            rows.append(_Row(label=f"{lane}  {worker}", note=note if i == 0 else "", spans=own))
    return rows


def _overlap(spans: Sequence[SpanRecord]) -> bool:
    ordered = sorted(spans, key=lambda span: span.start_s)
    return any(b.start_s < a.end_s - 1e-3 and a.worker != b.worker for a, b in itertools.pairwise(ordered))


def _covered_s(spans: Iterable[SpanRecord], window: Window) -> float:
    """Seconds of the window that lie in at least one of the spans."""
    covered_s, reached_s = 0.0, window.start_s
    for span in sorted(spans, key=lambda span: span.start_s):
        start_s, end_s = max(span.start_s, reached_s), min(span.end_s, window.end_s)
        covered_s += max(0.0, end_s - start_s)
        reached_s = max(reached_s, end_s)
    return covered_s


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


# -- drawing -----------------------------------------------------------------------------------------------------------


def _frame(window: Window, scale: float, height: int) -> list[str]:
    """Steps as shaded stretches, the time axis below."""
    bottom = height - BOTTOM
    parts = []
    for i, (step, start_s, end_s) in enumerate(window.steps):
        x, width = LABEL_WIDTH + (start_s - window.start_s) * scale, (end_s - start_s) * scale
        shade = "step even" if i % 2 else "step"
        parts.append(f'<rect class="{shade}" x="{x:.1f}" y="4" width="{width:.1f}" height="{bottom - 4}"/>')
        parts.append(f'<text class="tick" x="{x + 5:.1f}" y="16">step {step + 1}, {seconds(end_s - start_s)}</text>')
    unit, factor = ("ms", 1e3) if window.duration_s < 2 else ("s", 1.0)
    for value in ticks(0.0, window.duration_s * factor, max_ticks=10):
        x = LABEL_WIDTH + value / factor * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{bottom + 15}">{number(value)}</text>')
    middle = (LABEL_WIDTH + WIDTH) / 2
    parts.append(
        f'<text class="tick" text-anchor="middle" x="{middle}" y="{height - 6}">'
        f"{unit} since the start of step {window.steps[0][0] + 1}</text>"
    )
    return parts


def _draw_row(row: _Row, y: int, window: Window, scale: float, colors: Mapping[str, str]) -> list[str]:
    middle = y + ROW_HEIGHT / 2
    parts = [
        f'<line class="rule" x1="0" x2="{WIDTH}" y1="{y + ROW_HEIGHT}" y2="{y + ROW_HEIGHT}"/>',
        f'<text class="lane" x="0" y="{middle + 4}">{escape(row.label)}'
        f'<tspan class="tick" dx="7">{escape(row.note)}</tspan></text>',
    ]
    thin = [span for span in row.spans if span.category not in ("stage", "sync")]
    thick = [span for span in row.spans if span.category in ("stage", "sync")]
    for spans, offset in ((thin, BAR_HEIGHT), (thick, 0)):
        for bar in _bars(spans, MERGE_PIXELS / scale):
            parts.append(_draw_bar(bar, y + 3 + offset, window, scale, colors))
    return parts


def _bars(spans: Sequence[SpanRecord], gap_s: float) -> list[_Bar]:
    groups: list[list[SpanRecord]] = []
    for span in spans:
        last = groups[-1][-1] if groups else None
        joins = last is not None and span.name == last.name and span.worker == last.worker
        if joins and last is not None and span.start_s - last.end_s < gap_s:
            groups[-1].append(span)
        else:
            groups.append([span])
    return [_Bar(spans=tuple(group)) for group in groups]


def _draw_bar(bar: _Bar, y: float, window: Window, scale: float, colors: Mapping[str, str]) -> str:
    first = bar.spans[0]
    start_s, end_s = max(bar.start_s, window.start_s), min(bar.end_s, window.end_s)
    x, width = LABEL_WIDTH + (start_s - window.start_s) * scale, max(0.7, (end_s - start_s) * scale)
    if first.category == "stage":
        look, height = f'fill="{colors.get(first.name, "var(--c7)")}"', BAR_HEIGHT - 2
    elif first.category == "sync":
        look, height = 'class="sync"', BAR_HEIGHT - 2
    else:
        look, height = 'class="wait"', THIN_HEIGHT
    return (
        f'<rect {look} x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="1.5"'
        f' data-tip="{escape(_hover(bar, window))}"/>'
    )


def _hover(bar: _Bar, window: Window) -> str:
    first = bar.spans[0]
    count = len(bar.spans)
    total_s = sum(span.duration_s for span in bar.spans)
    items = sum(span.num_items for span in bar.spans)
    lines = [
        f"{first.name}{f', {count} times' if count > 1 else ''}",
        f"{seconds(total_s)}, from {seconds(max(0.0, bar.start_s - window.start_s))}",
        f"{first.worker}, step {(first.step or 0) + 1}",
    ]
    if items:
        lines.append(f"{items} items")
    return "\n".join(lines)


def describe_busy(window: Window) -> str:
    """How busy the devices were, in a sentence."""
    shares = busy_shares(window)
    if not shares:
        return ""
    mean = sum(shares.values()) / len(shares)
    return f"Over these steps a stage computed on a device {percent(mean)} of the time, on average."
