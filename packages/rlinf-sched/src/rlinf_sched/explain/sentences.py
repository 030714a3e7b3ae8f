"""Describes a plan in sentences, for readers who have never seen one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlinf_sched.describe import index_ranges
from rlinf_sched.explain.busiest import busiest_sentence
from rlinf_sched.explain.gains import LESS
from rlinf_sched.explain.memory import handed_over, items_at_once
from rlinf_sched.explain.quantities import counted, gib, listed, seconds
from rlinf_sched.plan import Plan, StagePlan
from rlinf_sched.problem import Problem

if TYPE_CHECKING:
    from rlinf_sched.explain.explanation import PlanExplanation

BUSY_ENOUGH = 0.9
"""The least busy group is named if its utilization is below this fraction."""
NEARLY_FULL = 0.95
AGREEMENT = 0.05
"""Relative difference of planner and simulator that needs no note."""
CLOSE_CALL = 0.03
"""A runner-up this close deserves a measurement."""
WORTH_GAINING = 0.005
"""Minimum saved fraction of the step for a gain to be mentioned."""


def sentences(explanation: PlanExplanation) -> list[str]:
    """What happens and why, one sentence each, from the whole plan to its details."""
    return [
        *_headline(explanation),
        *_placement(explanation.problem, explanation.plan),
        *_path(explanation),
        *_use(explanation),
        *_memory(explanation),
        *_runner_up(explanation),
    ]


def measured_range_notes(problem: Problem, plan: Plan) -> Iterator[str]:
    """Notes if the plan uses a profile outside the range it was given for."""
    for stage in plan.stages:
        profile = problem.instance(stage)
        largest, num_items = profile.points[-1].num_items, items_at_once(problem, stage, profile)
        at = f"profiles.stages.{stage.stage}"
        if num_items > largest > 1:
            yield (
                f"{at}: the plan gives an instance {counted(num_items, 'item')} at once, more than the {largest:,} of "
                "its largest point; the time goes on at the slope of the last points and is less certain"
            )


def agreement_notes(plan: Plan, simulated_s: float) -> Iterator[str]:
    """Notes if planner and simulator, which check each other, differ."""
    if plan.prediction and abs(plan.prediction.step_s / simulated_s - 1) > AGREEMENT:
        yield (
            f"the planner expects {seconds(plan.prediction.step_s)} a step and the simulator {seconds(simulated_s)}; "
            "the modes are compared by the planner, everything else is by the simulator"
        )


def draws_notes(plan: Plan) -> Iterator[str]:
    """A note if plans were compared by drawn costs."""
    if plan.prediction and plan.prediction.num_draws:
        yield (
            f"plans are compared by the mean of {counted(plan.prediction.num_draws, 'step')} with drawn costs; the "
            "timeline is that of the step nearest to it"
        )


def _headline(explanation: PlanExplanation) -> Iterator[str]:
    problem, takes_s = explanation.problem, seconds(explanation.step_s)
    through = f"{counted(problem.num_items, 'item')} through {counted(len(problem.flow.stages), 'stage')}"
    where = f"as predicted for {problem.cluster.describe()}"
    if problem.flow.max_staleness:
        yield f"A step of {problem.flow.name}, {through}, ends every {takes_s}, {where}."
    else:
        yield f"One step of {problem.flow.name} takes {through} in {takes_s}, {where}."


def _placement(problem: Problem, plan: Plan) -> Iterator[str]:
    flow = problem.flow
    groups = {worker: plan.stage(names[0]) for worker, names in flow.workers.items()}
    placed = [(worker, stage) for worker, stage in groups.items() if stage.devices]
    if plan.mode == "collocated":
        yield f"Collocated: {listed([worker for worker, _ in placed])} take turns on the same devices."
    elif plan.mode == "disaggregated":
        yield (
            "Disaggregated: generation and training have devices of their own and work at the same time; "
            + listed([_where(worker, stage) for worker, stage in placed])
            + "."
        )
    else:
        yield f"Hybrid: {listed([_where(worker, stage) for worker, stage in placed])}."
    offloaded = [worker for worker, stage in placed if stage.offload]
    if offloaded:
        yield f"The state of {listed(offloaded)} goes to host memory when another turn comes to its devices."
    for cycle in flow.cycles():
        yield f"{listed(list(cycle)).capitalize()} feed each other round after round and run at the same time."
    pipelined = [stage for stage in plan.stages if stage.granularity and _overlaps(problem, plan, stage)]
    if pipelined:
        parts = [f"{stage.stage} {handed_over(problem, stage):,}" for stage in pipelined]
        yield f"Work is handed on before the batch is whole, so stages overlap; items at a time: {', '.join(parts)}."
    if flow.max_staleness:
        yield (
            f"Generation may run up to {counted(flow.max_staleness, 'step')} ahead of training, so steps overlap; all "
            "times are of the steady state."
        )


def _overlaps(problem: Problem, plan: Plan, stage: StagePlan) -> bool:
    """Whether another stage works on other devices on the output of this one."""
    readers = [plan.stage(name) for name in problem.flow.successors()[stage.stage]]
    return any(stage.devices and reader.devices and not set(stage.devices) & set(reader.devices) for reader in readers)


def _where(worker: str, stage: StagePlan) -> str:
    return f"{worker} on {counted(len(stage.devices), 'device')} ({index_ranges(stage.devices)})"


def _path(explanation: PlanExplanation) -> Iterator[str]:
    parts = [part for part in explanation.path if part.share >= 0.005]
    if parts:
        texts = [f"{part.label} ({part.share:.0%})" for part in parts]
        yield f"What the step waits for: {listed(texts)}."
    yield from busiest_sentence(explanation)
    yield from _gain(explanation)
    yield from _limits(explanation)


def _gain(explanation: PlanExplanation) -> Iterator[str]:
    """What would shorten the step most if it took less time."""
    for best in explanation.gains[:1]:
        if best.share < WORTH_GAINING:
            yield (
                f"With this plan no single stage helps: {LESS:.0%} off the time of any of them makes the step less "
                f"than {WORTH_GAINING:.1%} shorter, as several take turns in deciding."
            )
        else:
            yield (
                f"With this plan {LESS:.0%} off the time of {best.label} helps most: it makes the step "
                f"{best.share:.1%} shorter."
            )


def _limits(explanation: PlanExplanation) -> Iterator[str]:
    """Host stages on the critical path that have as many processes as their profile or their node allows."""
    problem = explanation.problem
    waited_for = {part.label for part in explanation.path if part.share >= 0.005}
    for stage in explanation.plan.stages:
        most = problem.profile(stage.stage).max_instances
        if stage.devices or stage.stage not in waited_for:
            continue
        if stage.num_ranks == most:
            yield (
                f"{stage.stage} has as many host processes as its profile allows, "
                f"profiles.stages.{stage.stage}.max_instances={most:,}."
            )
        elif stage.num_ranks == problem.most_on_host(stage.stage):
            yield (
                f"{stage.stage} has as many host processes as its node has cores for, "
                f"cluster.cpu_cores={problem.cluster.cpu_cores:,}."
            )


def _use(explanation: PlanExplanation) -> Iterator[str]:
    stages = set(explanation.spans.stages)
    shares = [
        (sum(share for label, share in use.busy_share.items() if label in stages), use.devices)
        for use in explanation.groups
    ]
    num_devices = sum(len(devices) for _, devices in shares)
    if not num_devices:
        return
    mean = sum(share * len(devices) for share, devices in shares) / num_devices
    least, where = min(shares)
    text = f"On average {mean:.0%} of the devices compute"
    if len(shares) > 1 and least < BUSY_ENOUGH:
        text += f"; the least busy are {index_ranges(where)}, with {least:.0%}"
    yield f"{text}."
    idle = len(explanation.problem.cluster.compute_devices) - num_devices
    if idle > 0:
        yield f"The plan leaves {counted(idle, 'device')} unused."


def _memory(explanation: PlanExplanation) -> Iterator[str]:
    if explanation.memory:
        use = max(explanation.memory, key=lambda use: use.used_bytes / use.capacity_bytes)
        share = use.used_bytes / use.capacity_bytes
        nearly = ", which leaves hardly any room for fragmentation" if share > NEARLY_FULL else ""
        warning = ", more than there is" if share > 1 else nearly
        yield (
            f"Memory is fullest on {index_ranges(use.group.devices)} while {use.fullest} computes: "
            f"{gib(use.used_bytes)} of {gib(use.capacity_bytes)} ({share:.0%}){warning}."
        )
    yield from _versions(explanation.problem, explanation.plan)


def _versions(problem: Problem, plan: Plan) -> Iterator[str]:
    """What published weights take of the devices that train, if steps overlap."""
    for worker, names in problem.flow.workers.items():
        placed = plan.stage(names[0])
        if placed.devices and (size := problem.versions_bytes(placed.stage, len(placed.devices))):
            yield (
                f"{worker} keeps {problem.flow.max_staleness + 1} versions of the weights until generation has "
                f"received them: {gib(size)} on each of its devices."
            )


def _runner_up(explanation: PlanExplanation) -> Iterator[str]:
    chosen, *others = explanation.modes
    for row in others[:1]:
        more = row.step_s / chosen.step_s - 1
        reason = f": {row.reason.rstrip('.')}" if row.reason else ""
        yield f"The best {row.mode} plan would take {seconds(row.step_s)}, {more:.1%} more{reason}."
        if abs(more) < CLOSE_CALL:
            yield "That is a close call; measure both before a long run."
