"""Makes plans from a config: by the planner or the mode's rule, with the user's choices, and with numbers of ranks that
divide the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.config.common import JobConfig, PlanConfig
from rlinf.config.devices import device_notes, make_cluster
from rlinf.errors import UserError
from rlinf.jobs.base import Flows, Job
from rlinf.planning.memory import PlanMemory, beside_cuda, cuda_bytes
from rlinf.run_folder.folder import GPU_MEMORY, PROBLEM
from rlinf.run_folder.plain_files import read_plain_json
from rlinf_sched import (
    Cluster,
    FlowGraph,
    InfeasibleError,
    Mode,
    Plan,
    Problem,
    SchedError,
    best_plan as make_plan,
    plan_for_mode,
    read_problem,
    simulate,
)
from rlinf_workers import Flow

NEGLIGIBLE = 0.02
"""Share of a step's predicted time that running further ahead has to save: samples of newer weights are better, and
predictions are less exact than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlans:
    """The plans of all flows of a run."""

    cluster: Cluster
    plans: dict[str, Plan]
    """Flow name -> plan."""
    notes: tuple[str, ...] = ()
    """Devices left idle, for the manifest."""
    problem: Problem | None = None
    """The problem that the plan was made from or can be compared with; None if nothing was measured."""


def make_plans(job: Job, flows: Flows, folder: Path) -> RunPlans:
    """The training flow by the planner (mode auto with a profile) or by the mode's rule and the user's choices; the
    other flows on the same devices. Mode auto without a profile begins collocated.

    Args:
        folder: the run's folder; measurements of an earlier session in it are the profile unless the config names one.
            GPU memory that was measured beside the profile replaces what is predicted of it.

    Raises: UserError for a placement that does not fit the flow or the machine, or a profile of another flow.
    """
    config, graph = job.config, flows.train.graph()
    cluster = make_cluster(config.cluster, job.machine)
    path = config.plan.profile or folder / PROBLEM
    problem = _read_profile(path, job, graph, cluster) if config.plan.profile or path.is_file() else None
    if job.memory is not None and (held_bytes := _held_bytes(path.with_name(GPU_MEMORY))):
        job.memory = job.memory.with_measured(held_bytes)
    if problem is not None and config.mode == "auto":
        planned = plans_of_problem(job, flows, problem)
    else:
        mode = "collocated" if config.mode == "auto" else config.mode
        planned = replace(plans_by_rule(job, flows, mode), problem=problem)
    _check_overlap(planned.plans[graph.name], graph, config.mode)
    return planned


def _held_bytes(file: Path) -> Mapping[str, int]:
    """Role -> what its ranks held of a GPU in an earlier run; empty if there is no such file."""
    if not file.is_file():
        return {}
    return {role: values["measured_bytes"] for role, values in read_plain_json(file)["roles"].items()}


def plans_by_rule(job: Job, flows: Flows, mode: Mode) -> RunPlans:
    """The training flow by the mode's rule and the user's choices. Raises: UserError for a placement that cannot be."""
    cluster = make_cluster(job.config.cluster, job.machine)
    try:
        plan, notes = _training_plan(job, flows.train.graph(), cluster, mode)
        notes = (*device_notes(job.config.cluster, job.machine), *notes)
        return replace(_with_others(flows, plan, cluster), notes=notes)
    except SchedError as error:
        section = "plan." if str(error).partition(".")[0] in PlanConfig.model_fields else ""
        raise UserError(f"{section}{error}", hint="see the keys mode and plan of the config") from error


def placements_to_measure(job: Job, flows: Flows) -> list[RunPlans]:
    """All stages together on all devices and, where there are several, apart. Raises: as `plans_by_rule`."""
    together = plans_by_rule(job, flows, "collocated")
    if together.cluster.num_devices == 1:
        return [together]
    return [together, plans_by_rule(job, flows, "disaggregated")]


def plans_of_problem(job: Job, flows: Flows, problem: Problem) -> RunPlans:
    """The training flow by the planner. If steps may overlap, the best plan without overlap is compared with the best
    one whose generation and training have separate devices, predicted with overlap; generation runs ahead of training
    no further than pays.

    Raises: UserError if nothing fits, or what fits does not suit the job.
    """
    try:
        graph = flows.train.graph()
        plan = _planned(problem, graph)
        if job.memory is not None:
            plan = _beside_cuda(problem, plan, graph, job.memory)
        problem = as_run(problem, plan, graph)
        _check_cycles(plan, problem.flow)
        if job.memory is not None:
            job.memory.check(plan)
        return replace(_with_others(flows, plan, problem.cluster), problem=problem)
    except SchedError as error:
        raise UserError(f"mode=auto: {error}", hint="choose a mode by hand") from error


def _planned(problem: Problem, graph: FlowGraph) -> Plan:
    plan = make_plan(problem.with_staleness(0))
    if graph.max_staleness and problem.cluster.num_devices > 1:
        plan = _with_overlap_if_faster(problem, plan, graph.max_staleness)
    return plan


def _beside_cuda(problem: Problem, plan: Plan, graph: FlowGraph, memory: PlanMemory) -> Plan:
    """The plan, or another one if it needs what CUDA takes of the GPUs in its processes, which profiles do not count.
    The plan as well if there is no other: the check names settings that fit."""
    place = memory.fullest_place(plan)
    if place.held_bytes is None or place.missing_bytes <= 0:
        return plan
    try:
        return _planned(replace(problem, cluster=beside_cuda(problem.cluster, cuda_bytes(place.loads))), graph)
    except InfeasibleError:
        return plan


def _with_overlap_if_faster(problem: Problem, plan: Plan, max_staleness: int) -> Plan:
    """The plan, or the best one whose steps overlap if they are shorter by more than `NEGLIGIBLE`. Its generation runs
    ahead by the fewest steps, up to max_staleness, that cost no more than `NEGLIGIBLE`."""
    try:
        furthest = make_plan(problem.with_staleness(max_staleness), ["disaggregated"])
    except InfeasibleError:
        return plan
    limit_s = (1.0 + NEGLIGIBLE) * _step_s(furthest)
    if _step_s(plan) <= limit_s:
        return plan
    for fewer in range(1, max_staleness):
        if simulate(problem.with_staleness(fewer), furthest).step_s <= limit_s:
            return make_plan(problem.with_staleness(fewer), ["disaggregated"])
    return furthest


def moved_stages(before: Plan, after: Plan) -> set[str]:
    """The stages that the plans place differently, so that their processes are others."""
    return {placed.stage for placed in before.stages if placed.place != after.stage(placed.stage).place}


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None, "the planner predicts"
    return plan.prediction.step_s


def as_run(problem: Problem, plan: Plan, graph: FlowGraph) -> Problem:
    """The problem as a plan runs it."""
    return problem.with_staleness(steps_ahead(plan, graph))


def steps_ahead(plan: Plan, graph: FlowGraph) -> int:
    """Steps by which generation runs ahead of training under the plan; 0 where they share devices."""
    return 0 if _shared_devices(plan, graph) else plan.steps_ahead(graph)


def _shared_devices(plan: Plan, graph: FlowGraph) -> list[int]:
    """Devices that both generation and training use."""
    training, generation = (
        {device for group in groups for device in plan.stage(graph.workers[group][0]).devices}
        for groups in (graph.training_groups, graph.generation_groups)
    )
    return sorted(training & generation)


def _with_others(flows: Flows, plan: Plan, cluster: Cluster) -> RunPlans:
    plans = {flow.name: _plan_like(flow, flows.train, plan, cluster) for flow in flows if flow is not flows.train}
    return RunPlans(cluster=cluster, plans={flows.train.name: plan, **plans})


def _read_profile(path: Path, job: Job, graph: FlowGraph, cluster: Cluster) -> Problem:
    """The problem in the file, on this machine's devices and with this recipe's items."""
    try:
        problem = read_problem(path)
    except SchedError as error:
        raise UserError(f"plan.profile={path}: {error}", hint="rlinf profile RECIPE writes such a file") from error
    profile_stages, mine = [stage.name for stage in problem.flow.stages], [stage.name for stage in graph.stages]
    if profile_stages != mine:
        raise UserError(
            f"plan.profile={path}: is of the stages {', '.join(profile_stages)}; this recipe has {', '.join(mine)}",
            hint="rlinf profile RECIPE measures this one",
        )
    return complete_problem(
        job,
        replace(
            problem,
            flow=graph,
            cluster=replace(cluster, links=problem.cluster.links, cpu_cores=problem.cluster.cpu_cores),
        ),
    )


def complete_problem(job: Job, problem: Problem) -> Problem:
    """The problem completed by the job; stages on the host have the machine's cores."""
    stages = {
        name: profile if problem.flow.stage(name).needs_device else replace(profile, max_instances=job.machine.num_cpus)
        for name, profile in problem.profiles.stages.items()
    }
    return replace(problem, num_items=job.num_items, profiles=replace(problem.profiles, stages=stages))


def _training_plan(job: Job, graph: FlowGraph, cluster: Cluster, mode: Mode) -> tuple[Plan, Sequence[str]]:
    chosen = job.config.plan
    choices: dict[str, Any] = chosen.model_dump(exclude={"profile"})
    choices["num_ranks_per_replica"] = job.config.replica_sizes
    _check_num_ranks(graph, job.config)
    first = plan_for_mode(graph, cluster, mode, **choices)
    notes = []
    for group, names in graph.workers.items():
        parts, placed = graph.stage(names[0]).num_parts, first.stage(names[0])
        if not parts or group in chosen.num_ranks:
            continue
        if not placed.devices:  # a rank for each core, as far as the parts can be dealt out evenly
            size = placed.num_ranks_per_replica
            most = max(1, min(parts, job.machine.num_cpus // size))
            choices["num_ranks"][group] = max(count for count in range(1, most + 1) if parts % count == 0) * size
        elif placed.num_ranks < len(placed.devices):
            trains, num_ranks = group in graph.training_groups, placed.num_ranks
            most = max(count for count in range(1, len(placed.devices) + 1) if parts % count == 0)
            advice = ""
            if trains and most > num_ranks and group not in chosen.devices and placed.num_replicas == num_ranks:
                if mode != "collocated":
                    num_ranks, choices["devices"][group] = most, placed.devices[:most]
                elif job.config.mode == mode:  # all groups have the same devices
                    advice = f" and the number of devices; --cluster.num_devices {most} gives it {most}"
            notes.append(
                f"{group}: {num_ranks} rank{'' if num_ranks == 1 else 's'} for {len(placed.devices)} devices, because "
                f"the ranks must divide {'actor.num_shards' if trains else 'env.num_groups'}={parts}{advice}"
            )
    ranked = plan_for_mode(graph, cluster, mode, **choices)
    chunks = {**job.chunks(ranked), **chosen.granularity}
    plan = plan_for_mode(graph, cluster, mode, **{**choices, "granularity": chunks})
    for placed in plan.stages:
        on_gpu = any(cluster.devices[index].kind == "cuda" for index in placed.devices)
        if on_gpu and placed.num_ranks > len(placed.devices):
            raise UserError(
                f"plan.num_ranks: {placed.stage} has {placed.num_ranks} ranks on {len(placed.devices)} GPUs",
                hint="use at most one rank for each GPU",
            )
    _check_cycles(plan, graph)
    if job.memory is not None:
        job.memory.check(plan)
    if job.memory is not None and any(placed.offload for placed in plan.stages) and job.memory.all_fit_at_once(plan):
        plan = replace(plan, stages=tuple(replace(placed, offload=False) for placed in plan.stages))
        notes.append("the devices have room for the state of all roles at once, so none of it goes to the host")
    return replace(plan, reason=first.reason), notes


def _check_cycles(plan: Plan, graph: FlowGraph) -> None:
    """A replica's stages of a cycle go round with all its parts. Raises: UserError for a hand-over that splits them."""
    for stage in (graph.stage(name) for cycle in graph.cycles() for name in cycle):
        placed = plan.stage(stage.name)
        num_parts = stage.num_parts // placed.num_replicas
        if placed.granularity and num_parts % placed.granularity:
            raise UserError(
                f"plan.granularity.{stage.name}={placed.granularity} does not divide the {num_parts} parts that a rank "
                "has of its work",
                hint="the stages of a cycle would wait for each other; use a divisor, or change env.num_groups",
            )


def _check_overlap(plan: Plan, graph: FlowGraph, mode: str) -> None:
    """Raises: UserError if steps are to overlap, and generation shares devices with training; mode auto begins that
    way."""
    if mode == "auto" or not graph.max_staleness:
        return
    if shared := _shared_devices(plan, graph):
        raise UserError(
            f"algorithm.max_staleness={graph.max_staleness} lets generation run ahead of training, and the two share "
            f"devices {shared}, on which only one of them computes at a time",
            hint="use mode=disaggregated, or give their workers separate devices with plan.devices",
        )


def _check_num_ranks(graph: FlowGraph, config: JobConfig) -> None:
    """Raises: UserError for a number of ranks whose replicas do not divide the parts of a group's work."""
    for group, num_ranks in config.plan.num_ranks.items():
        parts = graph.stage(graph.workers[group][0]).num_parts if group in graph.workers else 0
        num_replicas = num_ranks // config.replica_sizes.get(group, 1)
        if num_replicas and parts % num_replicas:
            which = f"={num_ranks}" if num_replicas == num_ranks else f"={num_ranks}, {num_replicas} replicas,"
            raise UserError(
                f"plan.num_ranks.{group}{which} does not divide its work, which comes in {parts} parts",
                hint=f"use a divisor of {parts}, or change actor.num_shards or env.num_groups",
            )


def _plan_like(flow: Flow, train: Flow, plan: Plan, cluster: Cluster) -> Plan:
    """A plan for a flow that uses worker groups of the training flow: where they are, with the chunks they have. State
    leaves its devices where it does so in training."""
    graph, train_graph = flow.graph(), train.graph()
    placed = {group: plan.stage(train_graph.workers[group][0]) for group in graph.workers}
    shared = {stage.name for stage in graph.stages} & {stage.name for stage in train_graph.stages}
    one_placement = len({stage.devices for stage in placed.values() if stage.devices}) == 1
    draft = plan_for_mode(
        graph,
        cluster,
        "collocated" if one_placement else "hybrid",
        granularity={stage: plan.stage(stage).granularity for stage in shared},
        devices={group: stage.devices for group, stage in placed.items()},
        num_ranks={group: stage.num_ranks for group, stage in placed.items()},
        num_ranks_per_replica={group: stage.num_ranks_per_replica for group, stage in placed.items()},
    )
    offload = {name: placed[group].offload for group, names in graph.workers.items() for name in names}
    return replace(draft, stages=tuple(replace(stage, offload=offload[stage.stage]) for stage in draft.stages))
