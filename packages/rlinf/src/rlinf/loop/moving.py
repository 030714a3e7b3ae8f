"""Moves of worker groups to the places of another plan, while the processes of a run go on.

decided      the new processes start beside the old ones if there is memory for both; those of trainers load a
             checkpoint, because the first load of a process takes several times as long as the second
steps        go on under the old plan until the new processes are ready
between two  the old processes leave, channels and weight syncs are opened anew, and the trainers' state passes through
steps        shared memory

Without memory for both, the old processes end first, and all of this happens between two steps
(docs/decisions/048-a-plan-changes-while-processes-run.md).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.jobs.base import Job
from rlinf.planning.plans import RunPlans
from rlinf.planning.side_by_side import MemoryForBoth
from rlinf_workers import Executor


@dataclass(frozen=True, kw_only=True)
class UpcomingMove:
    """A move that has been decided on."""

    planned: RunPlans
    text: str
    """How it is made, and why, for the user."""
    rehearsal: Sequence[Future[Any]] = ()
    """Calls of the trainers' new ranks, which need not succeed; empty if none started in advance."""

    def is_ready(self, executor: Executor) -> bool:
        """Whether no worker that was started for it has to be waited for."""
        return executor.is_ahead and all(call.done() for call in self.rehearsal)


def begin_move(
    job: Job, executor: Executor, planned: RunPlans, memory: MemoryForBoth, checkpoint: Path | None
) -> UpcomingMove:
    """Starts the workers of the new places, if there is memory for them beside the old ones.

    Args:
        checkpoint: any checkpoint of the run; None: its first one is still being written, and nothing is rehearsed.
    """
    if not memory.is_enough:
        return UpcomingMove(planned=planned, text=f"ends workers before it starts them elsewhere: {memory.text}")
    groups = executor.start_ahead(planned.plans)
    rehearsal: list[Future[Any]] = []
    if checkpoint is not None:
        for name, folder in job.trainers.items():
            if name in groups:
                rehearsal += groups[name].start_call("load_checkpoint", str(checkpoint / folder))
    return UpcomingMove(
        planned=planned,
        text=f"starts {', '.join(sorted(groups)) or 'no worker'} elsewhere while steps go on; {memory.text}",
        rehearsal=rehearsal,
    )


@contextmanager
def passed_state(executor: Executor, trainers: Mapping[str, str], like: Path) -> Iterator[Path | None]:
    """The present state of trainers in shared memory, in a folder like a checkpoint; None if there is no room.

    Args:
        trainers: the worker groups -> their folders in it.
        like: a checkpoint, for its size.
    """
    num_bytes = sum(path.stat().st_size for path in like.rglob("*") if path.is_file())
    folder = executor.shared_folder(num_bytes)
    if folder is None:
        yield None
        return
    try:
        for name, own in trainers.items():
            executor.group(name).call("begin_checkpoint", str(folder / own))
            executor.group(name).call("end_checkpoint")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
