"""All results of explaining a plan: what happens, how long it takes, the bottlenecks, the alternatives."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlinf_sched.describe import index_ranges
from rlinf_sched.explain.gains import Gain
from rlinf_sched.explain.memory import MemoryUse, memory_uses
from rlinf_sched.explain.sentences import agreement_notes, draws_notes, measured_range_notes, sentences
from rlinf_sched.explain.spans import Spans, device_groups, usage
from rlinf_sched.explain.what_if import WhatIf
from rlinf_sched.plan import Plan
from rlinf_sched.problem import Problem

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PathPart:
    """One stage's part of the critical path."""

    label: str
    """A stage, or another item on the critical path: `weight sync`, `moving state`."""
    seconds: float
    share: float
    """Fraction of the step's time, from 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeRow:
    """The best plan of one mode."""

    mode: str
    step_s: float
    is_chosen: bool
    reason: str
    """For the chosen plan, why it was chosen; for others, the term in which they are worse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupUse:
    """Utilization of a group of devices."""

    devices: tuple[int, ...]
    busy_share: Mapping[str, float]
    """Stage -> fraction of the time in which it computes on a device of the group, on average; `switch` is moving
    state, `sync` new weights."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanExplanation:
    """An explained plan. Text, JSON and the page are made from this alone."""

    problem: Problem
    plan: Plan
    spans: Spans
    path: tuple[PathPart, ...]
    modes: tuple[ModeRow, ...]
    """The chosen one first, then the others from fast to slow."""
    groups: tuple[GroupUse, ...]
    memory: tuple[MemoryUse, ...]
    answers: tuple[WhatIf, ...]
    """Answers to what-if questions; empty if none were asked."""
    gains: tuple[Gain, ...]
    """Time saved if one thing took less time, the largest first; empty if not requested."""
    notes: tuple[str, ...]
    """Caveats."""

    @property
    def step_s(self) -> float:
        """Seconds of a step as simulated: between consecutive ends, if steps overlap.

        The planner's own prediction is in the plan.
        """
        return self.spans.step_s

    @property
    def sentences(self) -> list[str]:
        """The plan in sentences."""
        return sentences(self)

    def __str__(self) -> str:
        """Tables and sentences, as `rlinf plan` prints them."""
        from rlinf_sched.explain.text import explanation_text  # which imports this module

        return explanation_text(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows."""
        printer.text(str(self))

    def to_json(self) -> str:
        """The explanation as JSON text: the plan, and everything the page shows except the timeline."""
        return json.dumps(_tree(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def explain(
    problem: Problem,
    plan: Plan,
    spans: Spans,
    path_s: Mapping[str, float],
    answers: Sequence[WhatIf] = (),
    gains: Sequence[Gain] = (),
) -> PlanExplanation:
    """Explains a plan.

    Args:
        plan: fits the problem.
        spans: its predicted timeline.
        path_s: label -> seconds of the critical path.
        answers: results of `what_if`, if requested.
        gains: results of `gains_of`, if requested.
    """
    parts = [PathPart(label=label, seconds=s, share=s / spans.step_s) for label, s in path_s.items() if s > 0]
    return PlanExplanation(
        problem=problem,
        plan=plan,
        spans=spans,
        path=tuple(sorted(parts, key=lambda part: -part.seconds)),
        modes=_modes(plan, spans.step_s),
        groups=tuple(_group_uses(plan, spans)),
        memory=tuple(memory_uses(problem, plan)),
        answers=tuple(answers),
        gains=tuple(gains),
        notes=(*draws_notes(plan), *measured_range_notes(problem, plan), *agreement_notes(plan, spans.step_s)),
    )


def _modes(plan: Plan, simulated_s: float) -> tuple[ModeRow, ...]:
    """Step times by one measure: the planner's, or the simulator's if there is none."""
    step_s = plan.prediction.step_s if plan.prediction else simulated_s
    others = plan.prediction.runners_up if plan.prediction else ()
    chosen = ModeRow(mode=plan.mode, step_s=step_s, is_chosen=True, reason=plan.reason)
    rest = [ModeRow(mode=other.mode, step_s=other.step_s, is_chosen=False, reason=other.reason) for other in others]
    return (chosen, *sorted(rest, key=lambda row: row.step_s))


def _group_uses(plan: Plan, spans: Spans) -> list[GroupUse]:
    whole = np.array([0.0, spans.length_s])
    uses = []
    for group in device_groups(plan):
        num = max(1, len(group.devices))
        busy = {label: float(devices[0]) / num for label, devices in usage(spans, plan, group, whole).items()}
        uses.append(GroupUse(devices=group.devices, busy_share=busy))
    return [use for use in uses if use.devices]


def _tree(explanation: PlanExplanation) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "step_s": explanation.step_s,
        "sentences": explanation.sentences,
        "notes": list(explanation.notes),
        "critical_path": [asdict(part) for part in explanation.path],
        "gains": [asdict(gain) for gain in explanation.gains],
        "modes": [asdict(row) for row in explanation.modes],
        "devices": [{"devices": index_ranges(use.devices), "busy_share": use.busy_share} for use in explanation.groups],
        "memory": [
            {
                "devices": index_ranges(use.group.devices),
                "fullest_in": use.fullest,
                "capacity_bytes": use.capacity_bytes,
                "used_bytes": use.used_bytes,
                "state_bytes": use.state_bytes,
                "work_bytes": use.work_bytes,
            }
            for use in explanation.memory
        ],
        "what_if": [asdict(answer) for answer in explanation.answers],
        "plan": json.loads(explanation.plan.to_json()),
    }
