"""Draws the predicted timeline of the devices over one step, or over several overlapping steps.

Every row is a stacked area chart of the share of its devices that each stage keeps busy. The row of a single device is
a Gantt chart; work shorter than a pixel appears as its share. So a thousand devices need few rows, and the tail of a
rollout appears as a slope.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from rlinf.report.axes import number, percent, time_axis
from rlinf_sched import index_ranges
from rlinf_sched.explain import DeviceGroup, PlanExplanation, device_groups, seconds, usage

MAX_SINGLE_ROWS = 16
"""Plans with more devices get a row per group of equal devices, with a few of its devices below."""
NUM_EXAMPLES = 3

WIDTH = 1120
LABEL_WIDTH = 168
RIGHT = 14
TOP, BOTTOM = 10, 40
GROUP_HEIGHT, DEVICE_HEIGHT, GAP = 84, 20, 9
NUM_BINS = WIDTH - LABEL_WIDTH - RIGHT
"""One bin per unit of the drawing."""
CELL, CROWDED = 7, 3
"""A cell of 7 units in which 3 batches of one device begin shows their mean, because stripes of one or two units are
unreadable."""
SAME = 0.004
"""Shares that differ by less are drawn as equal."""


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    note: str
    group: DeviceGroup

    @property
    def has_scale(self) -> bool:
        return len(self.group.devices) > 1

    @property
    def height(self) -> int:
        return GROUP_HEIGHT if self.has_scale else DEVICE_HEIGHT


def draw_gantt(explanation: PlanExplanation, colors: Mapping[str, str]) -> str:
    """Draws the timeline as HTML.

    Args:
        colors: stage, `switch` and `sync` -> CSS colour.
    """
    length_s = explanation.spans.length_s
    edges_s = np.linspace(0.0, length_s, NUM_BINS + 1)
    parts: list[str] = []
    y = TOP
    for row in _rows(explanation):
        parts += _draw_row(explanation, row, y, edges_s, colors)
        y += row.height + GAP
    height = y + BOTTOM
    since = "the end of an earlier step" if explanation.problem.flow.max_staleness else "the start of the step"
    axis = time_axis(length_s, left=LABEL_WIDTH, width=NUM_BINS, top=TOP, bottom=y, since=since)
    drawn = "".join([*axis, *parts])
    return (
        f'<div class="wide"><svg class="timeline" data-timeline viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="Predicted timeline of stages on devices">{drawn}</svg></div>'
    )


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(explanation: PlanExplanation) -> list[_Row]:
    groups = device_groups(explanation.plan)
    num_devices = sum(len(group.devices) for group in groups)
    rows = []
    for group in groups:
        devices: Sequence[int] = group.devices
        if not devices:
            rows.append(_Row("host", "", group))
        elif num_devices > MAX_SINGLE_ROWS and len(devices) > 1:
            count = f"{len(devices):,} devices"
            label = f"devices {index_ranges(devices)}"
            rows.append(_Row(label, count, group) if len(label) < 26 else _Row(count, "", group))
            devices = _examples(group)
        for device in devices:
            name = explanation.problem.cluster.devices[device].name
            single = DeviceGroup(devices=(device,), stages=group.stages)
            rows.append(_Row(name if name.startswith("cpu:") else f"device {device}", "", single))
    return rows


def _examples(group: DeviceGroup) -> Sequence[int]:
    """Returns a few devices spread over the group."""
    last = len(group.devices) - 1
    chosen = np.linspace(0, last, min(NUM_EXAMPLES, last + 1)).round().astype(int)
    return [group.devices[i] for i in dict.fromkeys(chosen.tolist())]


# -- drawing -----------------------------------------------------------------------------------------------------------


def _draw_row(
    explanation: PlanExplanation, row: _Row, y: int, edges_s: np.ndarray, colors: Mapping[str, str]
) -> list[str]:
    units = np.arange(NUM_BINS + 1) if row.has_scale else _uncrowded(explanation, row.group, edges_s)
    edges_s, nothing = edges_s[units], np.zeros(len(units) - 1)
    used = usage(explanation.spans, explanation.plan, row.group, edges_s)
    count = len(row.group.devices) or max(1.0, float(sum(used.values(), nothing).max(initial=1.0)))
    busy_s = sum((used[name] for name in row.group.stages if name in used), nothing) @ np.diff(edges_s)
    busy = float(busy_s) / explanation.spans.length_s / count
    note = ", ".join(text for text in (row.note, f"{percent(busy)} busy" if row.group.devices else "") if text)
    middle = y + row.height / 2
    text_y = middle - 4 if row.has_scale else middle + 4
    parts = [
        f'<rect class="step" x="{LABEL_WIDTH}" y="{y}" width="{NUM_BINS}" height="{row.height}"/>',
        f'<text class="lane" x="0" y="{text_y}">{escape(row.label)}</text>',
        f'<text class="tick" x="0" y="{text_y + 15}">{escape(note)}</text>'
        if row.has_scale
        else f'<text class="tick" text-anchor="end" x="{LABEL_WIDTH - 8}" y="{text_y}">{escape(note)}</text>',
    ]
    if row.has_scale:
        parts += [
            f'<text class="tick" text-anchor="end" x="{LABEL_WIDTH - 5}" y="{y + 8}">{count:,}</text>',
            f'<text class="tick" text-anchor="end" x="{LABEL_WIDTH - 5}" y="{y + row.height}">0</text>',
        ]
    below = nothing
    for label in [*row.group.stages, "switch", "sync"]:
        if label in used:
            share = np.clip(used[label] / count, 0.0, 1.0 - below)
            parts += _areas(label, share, below, row, y, units, edges_s, colors, count)
            below = below + share
    return parts


def _uncrowded(explanation: PlanExplanation, group: DeviceGroup, edges_s: np.ndarray) -> np.ndarray:
    """Returns the indices of the bin edges that remain after crowded cells are merged into one bin each."""
    spans, starts_s = explanation.spans, []
    for name in group.stages:
        stage = explanation.plan.stage(name)
        ranks = [r for r in range(stage.num_ranks) if not group.devices or group.devices[0] in stage.devices_of(r)]
        starts_s.append(spans.start_s[spans.of_stage(name) & np.isin(spans.rank, ranks)])
    cells_s = np.append(edges_s[:-1:CELL], edges_s[-1])
    is_crowded = np.histogram(np.concatenate(starts_s), bins=cells_s)[0] >= CROWDED
    units = np.arange(len(edges_s))
    cell = np.minimum(units // CELL, len(is_crowded) - 1)
    return units[(units % CELL == 0) | ~is_crowded[cell] | (units == units[-1])]


def _areas(
    label: str,
    share: np.ndarray,
    below: np.ndarray,
    row: _Row,
    y: int,
    units: np.ndarray,
    edges_s: np.ndarray,
    colors: Mapping[str, str],
    count: float,
) -> list[str]:
    """Draws one area per run of bins in which the stage is busy."""
    is_busy = share > SAME
    borders = np.flatnonzero(np.diff(np.concatenate(([False], is_busy, [False])).astype(int)))
    parts = []
    for start, end in zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True):
        xs = (LABEL_WIDTH + units[start : end + 1]).tolist()
        path = _outline(xs, below[start:end], share[start:end], y + row.height, row.height)
        mean = float(np.average(share[start:end], weights=np.diff(units[start : end + 1]))) * count
        amount = f"{number(mean)} of {number(count)} devices on average" if row.has_scale else ""
        busy = "" if row.has_scale or mean > 0.99 or not row.group.devices else f"{percent(mean)} of this time"
        begin_s, end_s = float(edges_s[start]), float(edges_s[end])
        lines = [TEXTS.get(label, label), f"{seconds(begin_s)} to {seconds(end_s)}", amount or busy]
        text = "\n".join(line for line in lines if line)
        parts.append(f'<path fill="{colors[label]}" d="{path}" data-tip="{escape(text)}"/>')
    return parts


TEXTS = {"switch": "moving state (onload, offload)", "sync": "weight sync"}


def _outline(xs: Sequence[int], below: np.ndarray, share: np.ndarray, base: int, height: int) -> str:
    """Returns a closed path between the bin edges `xs`: along the top from left to right, back along the bottom."""
    top = _steps(base - (below + share) * height, height)
    bottom = _steps(base - below * height, height)
    points = [f"M{xs[0]} {top[0][1]:.1f}"]
    points += [f"H{xs[begin]}V{level:.1f}" for begin, level in top[1:]]
    points.append(f"H{xs[-1]}V{bottom[-1][1]:.1f}")
    points += [f"H{xs[begin]}V{bottom[i][1]:.1f}" for i, (begin, _) in reversed(list(enumerate(bottom[1:])))]
    return "".join([*points, f"H{xs[0]}Z"])


def _steps(levels: np.ndarray, height: int) -> list[tuple[int, float]]:
    """Returns (first bin, level) of each run of nearly equal levels."""
    steps = [(0, float(levels[0]))]
    for i, level in enumerate(levels.tolist()):
        if abs(level - steps[-1][1]) > SAME * height:
            steps.append((i, level))
    return steps
