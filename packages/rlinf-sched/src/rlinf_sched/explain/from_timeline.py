"""Reduces a simulated timeline to one step, or to a few of the steady state if steps overlap."""

import numpy as np

from rlinf_sched.explain.spans import KINDS, Spans
from rlinf_sched.simulator import Timeline
from rlinf_sched.simulator.timeline import SPAN_KINDS

MOVING_STATE, MOVING_ITEMS, WEIGHT_SYNC = "moving state", "moving items", "weight sync"
_PATH_LABELS = {"onload": MOVING_STATE, "offload": MOVING_STATE, "transfer": MOVING_ITEMS, "sync": WEIGHT_SYNC}
_SAME_PACE = 0.01
"""Steps represent all if their mean is within this fraction of the overall pace."""


def spans_of(timeline: Timeline) -> Spans:
    """The spans of the steps that are shown, clipped at the beginning and the end.

    A weight sync, which the simulator counts once, is assigned to every rank of the stage that trained.
    """
    num_shown, start_s, end_s = _typical_steps(timeline)
    inside = np.flatnonzero((timeline.end_s > start_s) & (timeline.start_s < end_s))
    num_copies = np.where(timeline.rank[inside] < 0, timeline.num_instances[timeline.stage[inside]], 1)
    chosen = np.repeat(inside, num_copies)
    copy = np.arange(len(chosen)) - np.repeat(np.cumsum(num_copies) - num_copies, num_copies)
    kinds = np.array([KINDS.index(kind) for kind in SPAN_KINDS])
    return Spans(
        step_s=timeline.step_s,
        num_steps=num_shown,
        length_s=end_s - start_s,
        stages=timeline.stages,
        stage=timeline.stage[chosen],
        rank=np.where(timeline.rank[chosen] < 0, copy, timeline.rank[chosen]),
        kind=kinds[timeline.kind[chosen]],
        start_s=np.maximum(timeline.start_s[chosen] - start_s, 0.0),
        end_s=np.minimum(timeline.end_s[chosen], end_s) - start_s,
        num_items=timeline.num_items[chosen],
    )


def path_of(timeline: Timeline) -> dict[str, float]:
    """Label (a stage, or what is moved) -> mean seconds per shown step on the critical path."""
    _, start_s, end_s = _typical_steps(timeline)
    path: dict[str, float] = {}
    for segment in timeline.critical_path:
        label = _PATH_LABELS.get(segment.kind, segment.stage)
        spent_s = min(segment.end_s, end_s) - max(segment.start_s, start_s)
        if spent_s > 0:
            path[label] = path.get(label, 0.0) + spent_s * timeline.step_s / (end_s - start_s)
    return path


def _typical_steps(timeline: Timeline) -> tuple[int, float, float]:
    """(number of steps, start, end).

    Without overlap: the step whose length is closest to the mean. Overlapping steps may differ and repeat only every
    few steps: the shortest run of settled steps with the overall pace. The last steps are excluded, because nothing is
    generated beside them.
    """
    ends_s = np.concatenate([[0.0], timeline.step_end_s])
    ahead = timeline.max_staleness
    if not ahead:
        step = int(np.abs(np.diff(ends_s) - timeline.step_s).argmin())
        return 1, float(ends_s[step]), float(ends_s[step + 1])
    best = (float("inf"), 1, 0)
    for count in range(1, 2 * (ahead + 1) + 1):
        first = np.arange(timeline.first_settled, timeline.num_steps - ahead - count + 1)
        off = np.abs((ends_s[first + count] - ends_s[first]) / count / timeline.step_s - 1).round(9)
        best = min(best, (float(off.min()), count, int(first[off.argmin()])))
        if best[0] < _SAME_PACE:
            break
    _, count, first = best
    return count, float(ends_s[first]), float(ends_s[first + count])
