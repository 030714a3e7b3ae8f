"""Draws the timeline of the last complete steps from the trace: which stage computed where and when."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from rlinf.report.axes import percent, time_axis
from rlinf.report.records import RunRecords, SpanRecord
from rlinf.report.waits import WAIT
from rlinf_sched.explain import seconds

NUM_STEPS = 3
"""Maximum number of steps drawn."""
NUM_STEPS_SEARCHED = 8
"""Number of newest steps that are searched for complete ones; spans of older steps are not kept in memory."""
OVERLAP = 0.2
"""Fraction of a step by which the next one may appear to begin early."""
MAX_SPANS = 4000
"""Maximum number of spans; beyond it, fewer steps are drawn."""

WIDTH = 1120
LABEL_WIDTH = 150
TOP, BOTTOM = 22, 38
ROW_HEIGHT, BAR_HEIGHT, THIN_HEIGHT = 28, 20, 4
LETTER_WIDTH = 6
MERGE_PIXELS = 0.5
"""Spans of one stage and row that are closer together are drawn as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The part of the run that is drawn."""

    steps: tuple[tuple[int, float, float], ...]
    """Consecutive (step, start, end), in seconds from the run's start."""
    spans: tuple[SpanRecord, ...]

    def with_waits(self, waits: Iterable[SpanRecord]) -> Window:
        """The window with the waits between its steps."""
        inside = [span for span in waits if self.start_s < span.end_s and span.start_s < self.end_s]
        return replace(self, spans=(*inside, *self.spans))

    @property
    def start_s(self) -> float:
        return self.steps[0][1]

    @property
    def end_s(self) -> float:
        return self.steps[-1][2]

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


_Row = tuple[str, str, Sequence[SpanRecord]]
"""Label, note and spans of one row of bars."""


def last_steps(records: RunRecords) -> Window | None:
    """Returns the last complete training steps in the trace; None if there are none.

    A step ends with the last span that has its number. Its start is the end minus the duration in the metrics, because
    an evaluation or an SFT warm-up before it has the same number. If steps overlap, that is the end of the step before,
    and what later steps compute meanwhile is drawn too.
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
    chosen_spans: list[SpanRecord] = []
    for step in sorted(by_step, reverse=True)[:NUM_STEPS]:
        step_s = duration_s[step]
        end_s = max(span.end_s for span in by_step[step])
        start_s = end_s - step_s
        until_s = chosen[0][1] if chosen else end_s
        inside = [span for span in by_step[step] if start_s < _middle_s(span)]
        ahead = (span for other in by_step if other > step for span in by_step[other])
        inside += [span for span in ahead if start_s < _middle_s(span) <= until_s]
        if chosen:
            later_step, later_start_s, later_end_s = chosen[0]
            # The driver's part of a step comes after its last span, so steps overlap a little.
            follows = step == later_step - 1 and end_s <= later_start_s + OVERLAP * step_s
            if not follows or len(chosen_spans) + len(inside) > MAX_SPANS:
                break
            chosen[0] = (later_step, max(later_start_s, end_s), later_end_s)
        chosen.insert(0, (step, start_s, end_s))
        chosen_spans += inside
    return Window(steps=tuple(chosen), spans=tuple(chosen_spans)) if chosen else None


def _middle_s(span: SpanRecord) -> float:
    return (span.start_s + span.end_s) / 2


def busy_shares(window: Window) -> dict[str, float]:
    """Returns device -> share of the window in which a stage computed on it."""
    return {
        lane: _covered_s([s for s in spans if s.category == "stage"], window) / window.duration_s
        for lane, spans in _by_lane(window).items()
        if spans[0].is_device
    }


def draw_timeline(window: Window, colors: Mapping[str, str]) -> str:
    """Draws the timeline as HTML.

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
    """Groups spans by lane: devices, then workers without one, each in natural order (`cpu:2` before `cpu:10`)."""
    lanes: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in sorted(window.spans, key=lambda span: span.start_s):
        for lane in span.lanes:
            lanes[lane].append(span)
    return dict(sorted(lanes.items(), key=lambda kv: (not kv[1][0].is_device, _natural(kv[0]))))


def _rows(window: Window) -> list[_Row]:
    """Returns one row per lane, or one per worker if workers compute on the lane at the same time."""
    busy = busy_shares(window)
    rows: list[_Row] = []
    for lane, spans in _by_lane(window).items():
        note = f"{busy[lane]:.0%} busy" if lane in busy else ""
        computing = [span for span in spans if span.category == "stage"]
        workers = list(
            dict.fromkeys(span.worker for span in (*computing, *spans))
        )  # in the order in which they begin to compute
        if len(workers) == 1 or not _overlap(computing):
            rows.append((lane, note, spans))
            continue
        for i, worker in enumerate(workers):
            own = [span for span in spans if span.worker == worker]
            rows.append((f"{lane}  {worker}", note if i == 0 else "", own))
    return rows


def _overlap(spans: Sequence[SpanRecord]) -> bool:
    ordered = sorted(spans, key=lambda span: span.start_s)
    return any(b.start_s < a.end_s - 1e-3 and a.worker != b.worker for a, b in itertools.pairwise(ordered))


def _covered_s(spans: Iterable[SpanRecord], window: Window) -> float:
    """Returns the seconds of the window covered by at least one span."""
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
    """Draws steps as shaded areas, with the time axis below."""
    bottom = height - BOTTOM
    parts = []
    for i, (step, start_s, end_s) in enumerate(window.steps):
        x, width = LABEL_WIDTH + (start_s - window.start_s) * scale, (end_s - start_s) * scale
        shade = "step even" if i % 2 else "step"
        parts.append(f'<rect class="{shade}" x="{x:.1f}" y="4" width="{width:.1f}" height="{bottom - 4}"/>')
        parts.append(f'<text class="tick" x="{x + 5:.1f}" y="16">step {step + 1}, {seconds(end_s - start_s)}</text>')
    since = f"the start of step {window.steps[0][0] + 1}"
    width = window.duration_s * scale
    return [*parts, *time_axis(window.duration_s, left=LABEL_WIDTH, width=width, top=TOP, bottom=bottom, since=since)]


def _draw_row(row: _Row, y: int, window: Window, scale: float, colors: Mapping[str, str]) -> list[str]:
    label, note, spans = row
    parts = [
        f'<line class="rule" x1="0" x2="{WIDTH}" y1="{y + ROW_HEIGHT}" y2="{y + ROW_HEIGHT}"/>',
        f'<text class="lane" x="0" y="{y + ROW_HEIGHT / 2 + 4}">{escape(label)}'
        f'<tspan class="tick" dx="7">{escape(note)}</tspan></text>',
    ]
    waits = [span for span in spans if span.category == WAIT]
    thin = [span for span in spans if span.category not in ("stage", "sync", WAIT)]
    thick = [span for span in spans if span.category in ("stage", "sync")]
    for drawn, offset in ((waits, 0), (thin, BAR_HEIGHT), (thick, 0)):
        for bar in _bars(drawn, MERGE_PIXELS / scale):
            parts.append(_draw_bar(bar, y + 3 + offset, window, scale, colors))
    return parts


def _bars(spans: Sequence[SpanRecord], gap_s: float) -> list[list[SpanRecord]]:
    """Groups neighbouring spans of one name and worker, which are drawn as one rectangle."""
    bars: list[list[SpanRecord]] = []
    for span in spans:
        last = bars[-1][-1] if bars else span
        if bars and (span.name, span.worker) == (last.name, last.worker) and span.start_s - last.end_s < gap_s:
            bars[-1].append(span)
        else:
            bars.append([span])
    return bars


def _draw_bar(bar: Sequence[SpanRecord], y: float, window: Window, scale: float, colors: Mapping[str, str]) -> str:
    first = bar[0]
    start_s, end_s = max(first.start_s, window.start_s), min(max(span.end_s for span in bar), window.end_s)
    x, width = LABEL_WIDTH + (start_s - window.start_s) * scale, max(0.7, (end_s - start_s) * scale)
    if first.category == "stage":
        look, height = f'fill="{colors.get(first.name, "var(--c7)")}"', BAR_HEIGHT - 2
    elif first.category == "sync":
        look, height = 'class="sync"', BAR_HEIGHT - 2
    elif first.category == WAIT:
        look, height = 'class="idle"', BAR_HEIGHT - 2
    else:
        look, height = 'class="wait"', THIN_HEIGHT
    num_items = sum(span.num_items for span in bar)
    lines = [
        f"{first.name}, {len(bar)} times" if len(bar) > 1 else first.name,
        f"{seconds(sum(span.duration_s for span in bar))}, from {seconds(start_s - window.start_s)}",
        f"{first.worker}, step {(first.step or 0) + 1}",
        *([f"{num_items} items"] if num_items else []),
    ]
    tip = escape("\n".join(lines))
    text = ""
    if first.label and len(first.label) * LETTER_WIDTH < width:
        text = (
            f'<text class="tick" x="{x + width / 2:.1f}" y="{y + 13}" text-anchor="middle">{escape(first.label)}</text>'
        )
    return f'<rect {look} x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="1.5" data-tip="{tip}"/>{text}'


def describe_busy(window: Window) -> str:
    """Describes how busy the devices were."""
    shares = busy_shares(window)
    if not shares:
        return ""
    mean = sum(shares.values()) / len(shares)
    return f"Over these steps a stage computed on a device {percent(mean)} of the time, on average."
