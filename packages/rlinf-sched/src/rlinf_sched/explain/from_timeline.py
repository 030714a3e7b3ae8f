"""What a simulation says, cut down to the last of its steps."""

import numpy as np

from rlinf_sched.explain.spans import KINDS, Spans
from rlinf_sched.simulator import Timeline
from rlinf_sched.simulator.timeline import SPAN_KINDS

MOVING_STATE, MOVING_ITEMS, WEIGHT_SYNC = "moving state", "moving items", "weight sync"
_PATH_LABELS = {"onload": MOVING_STATE, "offload": MOVING_STATE, "transfer": MOVING_ITEMS, "sync": WEIGHT_SYNC}


def spans_of(timeline: Timeline) -> Spans:
    """The spans of the last step, from the end of the step before it; those that reach across an end are cut there.

    A weight sync, which the simulator counts once, is given to every rank of the stage that trained.
    """
    end_s = timeline.total_s
    start_s = float(timeline.step_end_s[-2]) if len(timeline.step_end_s) > 1 else 0.0
    inside = np.flatnonzero((timeline.end_s > start_s) & (timeline.start_s < end_s))
    num_copies = np.where(timeline.rank[inside] < 0, timeline.num_instances[timeline.stage[inside]], 1)
    chosen = np.repeat(inside, num_copies)
    copy = np.arange(len(chosen)) - np.repeat(np.cumsum(num_copies) - num_copies, num_copies)
    kinds = np.array([KINDS.index(kind) for kind in SPAN_KINDS])
    return Spans(
        step_s=end_s - start_s,
        stages=timeline.stages,
        stage=timeline.stage[chosen],
        rank=np.where(timeline.rank[chosen] < 0, copy, timeline.rank[chosen]),
        kind=kinds[timeline.kind[chosen]],
        start_s=np.maximum(timeline.start_s[chosen] - start_s, 0.0),
        end_s=np.minimum(timeline.end_s[chosen], end_s) - start_s,
        num_items=timeline.num_items[chosen],
    )


def path_of(timeline: Timeline) -> dict[str, float]:
    """Label -> seconds of the critical path within the last step: a stage, or what is moved."""
    start_s = float(timeline.step_end_s[-2]) if len(timeline.step_end_s) > 1 else 0.0
    found: dict[str, float] = {}
    for segment in timeline.critical_path:
        label = _PATH_LABELS.get(segment.kind, segment.stage)
        spent_s = segment.end_s - max(segment.start_s, start_s)
        if spent_s > 0:
            found[label] = found.get(label, 0.0) + spent_s
    return found
