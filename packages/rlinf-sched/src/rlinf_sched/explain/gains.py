"""The gain from speeding up one thing: the plan stays, and the simulator runs again with shorter times."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rlinf_sched.explain.from_timeline import MOVING_ITEMS, MOVING_STATE, WEIGHT_SYNC
from rlinf_sched.plan import Plan
from rlinf_sched.planner.judged import judging
from rlinf_sched.problem import Problem
from rlinf_sched.simulator.lowering import Lowered, lower
from rlinf_sched.simulator.simulation import execute_lowered

LESS = 0.1
"""Fraction of its time by which each thing is sped up."""
MOST_ITEMS = 300_000
"""Maximum total of items over stages, rounds and simulated steps for which gains are computed: 0.1 s per simulation."""

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The gain if one thing took `LESS` less time."""

    label: str
    """A stage, `the weight sync from actor to rollout`, `moving state` (onload and offload) or `moving items`."""
    share: float
    """Fraction of the step's time that is saved; negative if the step gets longer."""


def gains_of(problem: Problem, plan: Plan, *, num_draws: int = 0) -> tuple[Gain, ...]:
    """The gain of each stage and each kind of transfer, the largest first; one simulation each.

    Args:
        plan: fits the problem.
        num_draws: as used for the plan.

    Returns:
        empty if a step has too many items to be simulated that often.
    """
    lowered = lower(problem, plan, **judging(num_draws))
    num_items = problem.num_items * sum(problem.profile(stage.name).rounds for stage in problem.flow.stages)
    if num_items * lowered.num_steps > MOST_ITEMS:
        return ()

    def step_s(changed: Arrays) -> float:
        return execute_lowered(problem, replace(lowered, arrays={**lowered.arrays, **changed})).step_s

    now_s = step_s({})
    gains = [Gain(label=label, share=1 - step_s(changed) / now_s) for label, changed in _changes(problem, lowered)]
    return tuple(sorted(gains, key=lambda gain: -gain.share))


def _changes(problem: Problem, lowered: Lowered) -> Iterator[tuple[str, Arrays]]:
    """The things to speed up, each with changed arrays."""
    arrays = lowered.arrays
    ends = [*arrays["table_start"][1:].tolist(), len(arrays["table"])]
    for s, (name, start, end) in enumerate(zip(lowered.stages, arrays["table_start"].tolist(), ends, strict=True)):
        table, step_s = arrays["table"].copy(), arrays["step_s"].copy()
        table[start:end] *= 1 - LESS
        step_s[s] *= 1 - LESS
        yield name, {"table": table, "step_s": step_s}
    for e, edge in enumerate(problem.flow.weight_edges):
        sync_s = arrays["sync_s"].copy()
        sync_s[e] *= 1 - LESS
        yield f"the {WEIGHT_SYNC} from {edge.source} to {edge.target}", {"sync_s": sync_s}
    for label, keys in ((MOVING_STATE, ("onload_s", "offload_s")), (MOVING_ITEMS, ("edge_latency_s", "edge_item_s"))):
        if any((arrays[key] > 0).any() for key in keys):  # below 0: never moves
            yield label, {key: np.where(arrays[key] > 0, arrays[key] * (1 - LESS), arrays[key]) for key in keys}
