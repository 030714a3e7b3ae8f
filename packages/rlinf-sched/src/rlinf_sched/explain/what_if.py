"""What-if questions: more devices, another GPU, a faster network, larger steps, overlapping steps, longer completions,
no offload. Each is answered by a new plan."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rlinf_sched.cluster import Cluster
from rlinf_sched.derive.datasheets import GPUS, Gpu
from rlinf_sched.errors import InfeasibleError
from rlinf_sched.explain.quantities import counted
from rlinf_sched.flow_graph import FlowGraph
from rlinf_sched.plan import Mode, Plan
from rlinf_sched.problem import MAX_ITEMS, Problem
from rlinf_sched.profile import InstanceProfile, Profiles, StageProfile

LONGER = 1.3
STALENESSES = (0, 1, 2, 4)
"""Bounds on staleness that are tried."""
MakePlan = Callable[[Problem, Sequence[Mode] | None], Plan]
"""The planner; the modes to plan, or None for those of the original plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemVariant:
    """A changed problem."""

    question: str
    """The question in words: "twice the devices"."""
    meaning: str
    """The exact change."""
    problem: Problem
    modes: tuple[Mode, ...] | None = None
    """Modes that can run it; None: those of the original plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The planner's result for a changed problem."""

    question: str
    meaning: str
    step_s: float | None
    """Seconds of a step; None if no plan fits."""
    mode: str | None
    num_devices: int
    text: str
    """The effect in words, or why nothing fits."""


def changes(problem: Problem, plan: Plan) -> Iterator[ProblemVariant]:
    """The questions that apply to a problem.

    Args:
        plan: the plan of the original problem, for the number of devices that generate.
    """
    num_devices = len(problem.cluster.compute_devices)
    group = _main_generation_group(problem.flow)
    if group is not None:
        own = len(plan.stage(problem.flow.workers[group][0]).devices)
        yield ProblemVariant(
            question=f"twice the {group} devices",
            meaning=f"{own} more devices, {2 * own} of all {num_devices + own} for {group}",
            problem=replace(
                problem,
                cluster=grown(problem.cluster, own),
                pinned_devices={**problem.pinned_devices, group: 2 * own},
            ),
        )
        yield from _other_splits(problem, plan, group)
    yield ProblemVariant(
        question="twice the devices",
        meaning=f"{2 * num_devices} in place of {num_devices}",
        problem=replace(problem, cluster=grown(problem.cluster, num_devices)),
    )
    yield from _other_machines(problem)
    yield from _other_steps(problem)
    if problem.flow.cycles():
        yield ProblemVariant(
            question="30 % longer episodes",
            meaning=f"rounds and the time of what comes after them times {LONGER}",
            problem=_longer(problem, set().union(*problem.flow.cycles())),
        )
    else:
        yield ProblemVariant(
            question="30 % longer answers",
            meaning=f"time, memory and bytes of every item times {LONGER}, in every stage",
            problem=_longer(problem, set()),
        )
    if problem.allow_offload:
        yield ProblemVariant(
            question="no offload",
            meaning="state stays on the devices between turns",
            problem=replace(problem, allow_offload=False),
        )


def _other_splits(problem: Problem, plan: Plan, group: str) -> Iterator[ProblemVariant]:
    """A device more and a device less for generation, and one more in all, if training has devices of its own."""
    flow, num_devices = problem.flow, len(problem.cluster.compute_devices)
    own = plan.stage(flow.workers[group][0]).devices
    training = {device for name in flow.training_groups for device in plan.stage(flow.workers[name][0]).devices}
    if training & set(own):
        return
    for more, question in ((1, f"a {group} device more"), (-1, f"a {group} device less")):
        if 0 < len(own) + more < num_devices:
            yield ProblemVariant(
                question=question,
                meaning=f"{len(own) + more} of {num_devices} devices for {group}, in place of {len(own)}",
                problem=replace(problem, pinned_devices={**problem.pinned_devices, group: len(own) + more}),
                modes=(plan.mode,),
            )
    yield ProblemVariant(
        question="one more device",
        meaning=f"{num_devices + 1} in place of {num_devices}",
        problem=replace(problem, cluster=grown(problem.cluster, 1)),
    )


def _other_machines(problem: Problem) -> Iterator[ProblemVariant]:
    """A faster network if there are several nodes, and the first GPU that is at least as fast by its datasheet."""
    cluster = problem.cluster
    if cluster.num_nodes > 1:
        links = replace(cluster.links, network_bytes_per_s=2 * cluster.links.network_bytes_per_s)
        yield ProblemVariant(
            question="twice the network",
            meaning="twice the bytes per second between nodes",
            problem=replace(problem, cluster=replace(cluster, links=links)),
        )
    names = {cluster.devices[device].name for device in cluster.compute_devices}
    now = next((gpu for gpu in GPUS.values() if names == {gpu.name}), None)
    for short, gpu in GPUS.items():
        if (
            now
            and gpu != now
            and gpu.flops_per_s >= now.flops_per_s
            and gpu.memory_bytes_per_s > now.memory_bytes_per_s
        ):
            yield ProblemVariant(
                question=f"{short} in place of {now.name}",
                meaning=f"their memory; times by the datasheets: {gpu.memory_bytes_per_s / now.memory_bytes_per_s:.2f} "
                f"times as fast where batching is continuous (rate of memory), {gpu.flops_per_s / now.flops_per_s:.2f} "
                "times elsewhere (arithmetic); links as they are",
                problem=_on_other_gpus(problem, now, gpu),
            )
            return


def _on_other_gpus(problem: Problem, now: Gpu, gpu: Gpu) -> Problem:
    def moved(instance: InstanceProfile, factor: float) -> InstanceProfile:
        if not instance.num_devices:
            return instance
        return replace(
            instance,
            device_name=instance.device_name and gpu.name,
            points=tuple(replace(point, seconds=point.seconds * factor) for point in instance.points),
            step_s=instance.step_s * factor,
        )

    stages = {}
    for name, profile in problem.profiles.stages.items():
        rates = (now.memory_bytes_per_s, gpu.memory_bytes_per_s) if profile.batching == "continuous" else None
        before, after = rates or (now.flops_per_s, gpu.flops_per_s)
        stages[name] = replace(profile, instances=tuple(moved(one, before / after) for one in profile.instances))
    devices = tuple(
        replace(device, name=gpu.name, memory_bytes=gpu.memory_bytes) if device.name == now.name else device
        for device in problem.cluster.devices
    )
    cluster = replace(problem.cluster, devices=devices)
    return replace(problem, cluster=cluster, profiles=Profiles(stages=stages))


def _other_steps(problem: Problem) -> Iterator[ProblemVariant]:
    """Twice the items, and generation that is further ahead, or less far."""
    rounds = max(profile.rounds for profile in problem.profiles.stages.values())
    if 2 * problem.num_items * rounds <= MAX_ITEMS:
        yield ProblemVariant(
            question="twice the items a step",
            meaning=f"{2 * problem.num_items:,} in place of {problem.num_items:,}; compared item for item",
            problem=replace(problem, num_items=2 * problem.num_items),
        )
    for ahead in STALENESSES:
        apart: tuple[Mode, ...] = ("disaggregated",)
        if ahead == problem.flow.max_staleness or (ahead and len(problem.cluster.compute_devices) == 1):
            continue
        meaning = f"generation may run {counted(ahead, 'step')} ahead of training, on devices of its own"
        yield ProblemVariant(
            question=f"staleness {ahead}",
            meaning=f"{meaning if ahead else 'steps do not overlap'} (max_staleness)",
            problem=problem.with_staleness(ahead),
            modes=apart if ahead else None,
        )


def what_if(
    problem: Problem,
    plan: Plan,
    make_plan: MakePlan,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[WhatIf]:
    """Plans every changed problem and compares.

    Args:
        plan: the plan of the original problem, with a prediction.
        make_plan: the planner, with the other arguments used for the plan.
        on_progress: called with each question and its number, such as `twice the devices (2/7)`, before it is planned.
    """
    variants, answers = list(changes(problem, plan)), []
    for number, change in enumerate(variants, start=1):
        on_progress(f"{change.question} ({number}/{len(variants)})")
        answers.append(_answer(change, plan, make_plan, problem.num_items))
    return answers


def grown(cluster: Cluster, num_more: int) -> Cluster:
    """The cluster with more devices like its last one, on new nodes of its largest node's size."""
    last = cluster.devices[cluster.compute_devices[-1]]
    sizes = [sum(device.node == node for device in cluster.devices) for node in {d.node for d in cluster.devices}]
    first_node = max(device.node for device in cluster.devices) + 1
    more = tuple(
        replace(last, index=cluster.num_devices + i, node=first_node + i // max(sizes)) for i in range(num_more)
    )
    return replace(cluster, devices=(*cluster.devices, *more))


def _main_generation_group(flow: FlowGraph) -> str | None:
    """The stage with the role rollout, otherwise the first."""
    groups = flow.generation_groups
    playing = [group for group in groups if any(flow.stage(name).role == "rollout" for name in flow.workers[group])]
    return next(iter([*playing, *groups]), None)


def _answer(change: ProblemVariant, plan: Plan, make_plan: MakePlan, num_items: int) -> WhatIf:
    num_devices = len(change.problem.cluster.compute_devices)
    try:
        other = make_plan(change.problem, change.modes)
    except InfeasibleError as e:
        return WhatIf(
            question=change.question,
            meaning=change.meaning,
            step_s=None,
            mode=None,
            num_devices=num_devices,
            text=str(e),
        )
    assert plan.prediction is not None and other.prediction is not None, "the planner sets predictions"
    before_s, after_s = plan.prediction.step_s * change.problem.num_items / num_items, other.prediction.step_s
    if abs(after_s - before_s) < 0.005 * before_s:
        text = "makes no difference"
    elif after_s < before_s:
        text = f"{before_s / after_s:.2f} times as fast"
    else:
        text = f"{after_s / before_s - 1:.0%} slower"
    if other.mode != plan.mode:
        text += f"; {other.mode} in place of {plan.mode}"
    return WhatIf(
        question=change.question,
        meaning=change.meaning,
        step_s=after_s,
        mode=other.mode,
        num_devices=num_devices,
        text=text,
    )


def _longer(problem: Problem, cycle: set[str]) -> Problem:
    """The problem with more rounds for the stages of the cycle, and more time, memory and bytes per item for others."""
    stages = {
        name: replace(profile, rounds=round(profile.rounds * LONGER)) if name in cycle else _slower(profile)
        for name, profile in problem.profiles.stages.items()
    }
    return replace(problem, profiles=Profiles(stages=stages), flow=_larger_items(problem.flow, cycle))


def _slower(profile: StageProfile) -> StageProfile:
    instances = tuple(
        replace(
            instance,
            points=tuple(replace(point, seconds=point.seconds * LONGER) for point in instance.points),
            item_work_bytes=round(instance.item_work_bytes * LONGER),
        )
        for instance in profile.instances
    )
    return replace(profile, instances=instances)


def _larger_items(flow: FlowGraph, cycle: set[str]) -> FlowGraph:
    inner = {channel for stage in flow.stages if stage.name in cycle for channel in stage.reads}
    sizes = {channel: size if channel in inner else round(size * LONGER) for channel, size in flow.item_bytes.items()}
    return replace(flow, item_bytes=sizes)
