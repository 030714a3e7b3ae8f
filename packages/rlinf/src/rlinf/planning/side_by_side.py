"""Counts whether workers can start in the places of another plan while those that they replace still run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rlinf.jobs.base import Job
from rlinf.planning.memory import PROCESS_BYTES
from rlinf.planning.plans import RunPlans, moved_stages
from rlinf_sched import Plan, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForBoth:
    """Whether there is memory for the old workers and the new ones."""

    is_enough: bool
    text: str
    """The count, for example `old and new processes need 3.1 GiB at most; this machine has 23.4`."""


def memory_for_both(job: Job, before: Plan, planned: RunPlans) -> MemoryForBoth:
    """Counts as the job does for a single plan, or on CPU slots by the measured memory of its processes."""
    problem = planned.problem
    assert problem is not None, "the planner has made the plan from one"
    after = planned.plans[before.flow]
    moved = moved_stages(before, after)
    groups = {group for group, stages in problem.flow.workers.items() if moved & set(stages)}
    if job.memory is not None:
        pool = job.memory.place_beside(before, after, groups)
        if pool is not None:
            return _compared(pool.needed_bytes, pool.has_bytes, pool.name)
    elif all(device.kind == "cpu" for device in problem.cluster.devices):
        needed_bytes = _measured_bytes(problem, before, problem.flow.workers) + _measured_bytes(problem, after, groups)
        return _compared(needed_bytes, job.machine.memory_bytes, "this machine")
    return MemoryForBoth(is_enough=False, text="the memory of these processes is not counted")


def _measured_bytes(problem: Problem, plan: Plan, groups: Collection[str]) -> int:
    """Bytes of the processes of these groups at their peaks."""
    needed_bytes = 0
    for group in groups:
        placed = plan.stage(problem.flow.workers[group][0])
        instance = problem.instance(placed)
        needed_bytes += placed.num_ranks * max(PROCESS_BYTES, instance.state_bytes + instance.work_bytes)
    return needed_bytes


def _compared(needed_bytes: int, has_bytes: int, place: str) -> MemoryForBoth:
    text = f"old and new processes need {needed_bytes / 2**30:.1f} GiB at most; {place} has {has_bytes / 2**30:.1f}"
    return MemoryForBoth(is_enough=needed_bytes <= has_bytes, text=text)
