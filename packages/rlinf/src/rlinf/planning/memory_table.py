"""What each role needs, by kind, as rows for people: the terminal's and the plan page's."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.planning.memory import Load, MemoryPool
from rlinf_sched.derive import MEMORY_KINDS

UNITS = (("GiB", 30), ("MiB", 20))


def memory_rows(loads: Sequence[Load]) -> tuple[str, list[tuple[str, ...]]]:
    """The unit, and a header with a row for each role: what one of its ranks takes of a device.

    The optimizer's step and the weight sync come at other times than a pass, so a row may be more than its peak.
    """
    of_role = {load.group: load for load in loads}
    parts = {role: load.memory.parts(load.num_items) for role, load in of_role.items()}
    kinds = [kind for kind in MEMORY_KINDS if any(kind in sizes for sizes in parts.values())]
    largest = max((load.peak for load in of_role.values()), default=0)
    unit, shift = next((unit for unit in UNITS if largest >> unit[1]), UNITS[-1])

    def amount(num_bytes: int) -> str:
        return f"{num_bytes / (1 << shift):,.2f}"

    rows = [("role", *kinds, "peak")]
    for role, load in of_role.items():
        cells = (amount(parts[role][kind]) if kind in parts[role] else "" for kind in kinds)
        rows.append((role, *cells, amount(load.peak)))
    return unit, rows


def memory_lines(place: MemoryPool) -> list[str]:
    """What a run says before its processes start."""
    unit, rows = memory_rows(place.loads)
    lines = _columns([(f"memory, {unit}", *rows[0][1:]), *rows[1:]])
    needs = f"{place.needs} {place.needed_bytes / 2**30:.2f} GiB at most; {place.name} has"
    return [*lines, f"{needs} {place.has_bytes / 2**30:.1f}"]


def memory_text(loads: Sequence[Load]) -> str:
    """What `rlinf plan` prints."""
    unit, rows = memory_rows(loads)
    return "\n".join([f"memory of a rank, {unit}", *(f"  {line}" for line in _columns(rows))])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Numbers end below one another."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
