"""The memory of each group of devices at its peak."""

from dataclasses import dataclass

from rlinf_sched import stage_time
from rlinf_sched.explain.spans import DeviceGroup, device_groups
from rlinf_sched.plan import Plan, StagePlan
from rlinf_sched.problem import Problem
from rlinf_sched.profile import InstanceProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """The memory of one device of a group; all devices of a group hold the same."""

    group: DeviceGroup
    capacity_bytes: int
    """Memory of the smallest device of the group."""
    fullest: str
    """The stage that computes at the peak."""
    state_bytes: dict[str, int]
    """Stage -> bytes of its weights, optimizer and environments on the device at that moment."""
    work_bytes: int
    """Work memory of the computing stage: activations, KV cache."""

    @property
    def used_bytes(self) -> int:
        return sum(self.state_bytes.values()) + self.work_bytes


def memory_uses(problem: Problem, plan: Plan) -> list[MemoryUse]:
    """The memory of each group of devices, in the order of `device_groups`; the host is left out."""
    return [_use(problem, plan, group) for group in device_groups(plan) if group.devices]


def peak_bytes(problem: Problem, plan: Plan, stage: str) -> int:
    """Peak bytes on a stage's devices while it computes, including the state of others there; 0 for a stage on the
    host."""
    moments = [
        _moment(problem, plan, group, stage) for group in device_groups(plan) if group.devices and stage in group.stages
    ]
    return max((sum(state.values()) + work for state, work in moments), default=0)


def _use(problem: Problem, plan: Plan, group: DeviceGroup) -> MemoryUse:
    capacity = min(problem.cluster.devices[device].memory_bytes for device in group.devices)
    moments = [_moment(problem, plan, group, name) for name in group.stages]
    fullest = max(range(len(moments)), key=lambda i: sum(moments[i][0].values()) + moments[i][1])
    state, work = moments[fullest]
    return MemoryUse(
        group=group,
        capacity_bytes=capacity,
        fullest=group.stages[fullest],
        state_bytes=state,
        work_bytes=work,
    )


def _moment(problem: Problem, plan: Plan, group: DeviceGroup, computing: str) -> tuple[dict[str, int], int]:
    """Resident bytes by stage, and the work memory of the computing stage; all stages of its turn are on the device."""
    turn, resident, work = plan.stage(computing).turn, {}, 0
    for name in _holders(problem, group, computing):
        stage = plan.stage(name)
        profile = problem.instance(stage)
        if stage.offload and stage.turn != turn:
            continue
        num_devices, per_device = len(stage.devices), max(1, stage.num_ranks // len(stage.devices))
        resident[name] = per_device * problem.state_bytes(name, profile, num_devices)
        if name == computing:
            num_items = items_at_once(problem, stage, profile)
            work = profile.extra_bytes(num_items)
            work *= per_device
    return resident, work


def _holders(problem: Problem, group: DeviceGroup, computing: str) -> list[str]:
    """One stage per worker group, because its stages share one state: the computing one, otherwise the first."""
    holder: dict[str, str] = {}
    for name in (computing, *group.stages):
        holder.setdefault(problem.flow.stage(name).worker, name)
    return [name for name in group.stages if name in holder.values()]


def handed_over(problem: Problem, stage: StagePlan) -> int:
    """Items per hand-over of an instance."""
    return stage_time.handed_over(
        problem.instance(stage),
        problem.profile(stage.stage).batching,
        num_items=problem.num_items,
        num_instances=stage.num_ranks,
        granularity=stage.granularity,
    )


def items_at_once(problem: Problem, stage: StagePlan, profile: InstanceProfile) -> int:
    """Items in one hand-over, or the maximum in a continuously batching engine."""
    return stage_time.items_at_once(
        profile,
        problem.profile(stage.stage).batching,
        num_items=problem.num_items,
        num_instances=stage.num_ranks,
        granularity=stage.granularity,
    )
