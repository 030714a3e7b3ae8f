"""Memory bars: the content of device memory at its peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from rlinf.planning.memory import Load, memory_rows, versions_lines
from rlinf.report import html
from rlinf.report.axes import percent
from rlinf_sched import index_ranges
from rlinf_sched.explain import MemoryUse, PlanExplanation, gib

MAX_LABEL = 30


def draw_memory(explanation: PlanExplanation, colors: Mapping[str, str]) -> str:
    """Draws the section as HTML, with one bar per group of devices, as long as its memory.

    Args:
        colors: stage -> CSS colour.
    """
    if not explanation.memory:
        return ""
    largest = max(max(use.capacity_bytes, use.used_bytes) for use in explanation.memory)
    present = [name for name in colors if any(name in use.state_bytes for use in explanation.memory)]
    entries = [(f"{name}: state", colors[name]) for name in present]
    entries.append(("work of the computing stage (activations, KV cache)", "var(--work)"))
    return html.section(
        "Memory of a device at its fullest",
        html.color_key(entries),
        *(_bar(use, largest, colors) for use in explanation.memory),
        note="The outline is the capacity. State is weights, gradients, optimizer and environments.",
    )


def memory_by_kind(loads: Sequence[Load]) -> str:
    """Draws the section as HTML; empty if memory is not known by kind."""
    if not loads:
        return ""
    unit, (header, *rows) = memory_rows(loads)
    return html.section(
        f"Memory of a rank by kind, {unit}",
        html.table(header, rows, numeric=range(1, len(header))),
        *(f'<p class="sub after">{escape(line)}.</p>' for line in versions_lines(loads)),
        note="At the longest sequences that the recipe allows. The optimizer's step and the weight sync come at other "
        "times than a pass, so the peak may be less than the sum.",
    )


def _bar(use: MemoryUse, largest_bytes: int, colors: Mapping[str, str]) -> str:
    parts = [(name, size, colors[name]) for name, size in use.state_bytes.items() if size]
    if use.work_bytes:
        parts.append((f"{use.fullest}: work", use.work_bytes, "var(--work)"))
    segments = "".join(
        f'<div style="width:{size / largest_bytes:.3%};background:{color}" title="{escape(name)}: {gib(size)}"></div>'
        for name, size, color in parts
    )
    devices = use.group.devices
    where = f"device{'s' if len(devices) > 1 else ''} {index_ranges(devices)}"
    where = where if len(where) <= MAX_LABEL else f"{len(devices):,} devices"
    listing = ", ".join(f"{name} {gib(size)}" for name, size, _ in parts)
    room = use.capacity_bytes / largest_bytes
    full = ' class="bad"' if use.used_bytes > use.capacity_bytes else ""
    return (
        f'<div class="memory"><div class="what"><span>{escape(where)}</span>'
        f"<span{full}><b>{gib(use.used_bytes)}</b> of {gib(use.capacity_bytes)} "
        f"({percent(use.used_bytes / use.capacity_bytes)}) while {escape(use.fullest)} computes</span></div>"
        f'<div class="bar"><div class="room" style="width:{room:.3%}"></div>{segments}</div>'
        f'<div class="sub">{escape(listing)}</div></div>'
    )
