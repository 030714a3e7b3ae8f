"""Pauses of overlapping steps: evaluations, checkpoints and profiles come between two steps, when all earlier ones have
ended and none of the later ones has begun."""

from __future__ import annotations

from rlinf.config.common import RunConfig
from rlinf.run_folder.record import RunRecord


def next_pause(run: RunConfig, step: int, record: RunRecord | None = None) -> int:
    """The first step after `step` that may not begin before all earlier ones have ended; at most `run.num_steps`. It
    follows from the config alone, so that a resumed run pauses where it would have without the interruption; or from
    the record of the steps."""
    if record is not None and (recorded := record.next_pause(step)) is not None:
        return recorded
    pauses = [every * (step // every + 1) for every in (run.evaluate_every, run.checkpoint_every)]
    if run.profiled_steps is not None:
        first, last = run.profiled_steps
        pauses += [edge for edge in (first - 1, last) if edge > step]
    return min(run.num_steps, *pauses)
