"""Explains why no plan fits, and the smallest change that would make one fit."""

from collections.abc import Sequence
from dataclasses import replace

from rlinf_sched.plan import Mode
from rlinf_sched.planner.columns import RowColumns
from rlinf_sched.planner.options import StageOptions
from rlinf_sched.planner.pools import Pool
from rlinf_sched.planner.search import Search
from rlinf_sched.problem import Problem

_GIB = 1 << 30


def why_nothing_fits(problem: Problem, pools: Sequence[Pool], modes: Sequence[Mode]) -> str:
    """One or two sentences: the stage that fits nowhere, or the memory that stages lack together."""
    columns, makes = RowColumns(len(pools), len(problem.flow.weight_edges)), StageOptions(problem, pools)
    for names in problem.flow.turns():
        rows = makes.of_turn(names).rows
        stage = " and ".join(names)
        if not len(rows):
            return f"{stage}: no parallel choice fits: {_choices(problem, names, pools)}"
        room = [float(pool.memory_bytes) for pool in pools]
        lacking = (rows[:, columns.peak] - room).max(axis=1)
        if lacking.min() > 0:
            least = float(lacking.min())
            have = max(room)
            return (
                f"{stage} needs at least {(have + least) / _GIB:.1f} GiB on a device in its best placement and there "
                f"are {have / _GIB:.1f} GiB: {least / _GIB:.1f} GiB too little; {_remedy(problem, stage, least)}"
            )
    if len(problem.cluster.compute_devices) < 2 and set(modes) == {"disaggregated"}:
        return "disaggregated needs at least 2 devices to place stages on; allow collocated"
    memory = _least_memory(problem, pools, modes)
    if memory is None:
        text = ", ".join(modes)
        return f"no plan of mode {text} exists for this flow on these devices, whatever their memory; allow others"
    have = max(pool.memory_bytes for pool in pools)
    remedy = "allow offload" if not problem.allow_offload else "add devices, or profile smaller hand-overs"
    return (
        f"each stage fits alone, but together they need {memory / _GIB:.1f} GiB on a device and there are "
        f"{have / _GIB:.1f} GiB: {(memory - have) / _GIB:.1f} GiB too little; {remedy}"
    )


def _choices(problem: Problem, names: Sequence[str], pools: Sequence[Pool]) -> str:
    devices = ", ".join(f"{pool.num_devices} x {pool.name}" for pool in pools)
    parts = []
    for name in names:
        worker = problem.flow.stage(name).worker
        width = problem.flow.devices_per_rank(worker)
        spans = {instance.num_devices: None for instance in problem.profile(name).instances}
        widths = [str(span) for span in spans if not width or span in (0, width)]
        on = sorted({instance.device_name for instance in problem.profile(name).instances} - {""})
        kind = f" of {', '.join(on)}" if on else ""
        pinned = problem.pinned_devices.get(worker)
        fixed = f", pinned_devices={pinned}" if pinned else ""
        fixed += f", devices_per_rank={width}" if width else ""
        parts.append(f"an instance of {name} spans {' or '.join(widths)} devices{kind}{fixed}")
    return f"{'; '.join(parts)}; the cluster has {devices}; add devices or a smaller parallel choice"


def _remedy(problem: Problem, stage: str, lacking: float) -> str:
    shards = [
        instance.sharded_state_bytes
        for name in stage.split(" and ")
        for instance in problem.profile(name).instances
        if instance.sharded_state_bytes
    ]
    if not shards:
        return "use devices with more memory, a wider parallel choice, or smaller hand-overs"
    num_devices = len(problem.cluster.compute_devices)
    share = max(shards) / num_devices
    if share <= lacking:
        return "use devices with more memory; more of them would not help enough"
    return f"it would fit on {-(-max(shards) // int(share - lacking))} devices, which share its sharded state"


def _least_memory(problem: Problem, pools: Sequence[Pool], modes: Sequence[Mode]) -> float | None:
    """Bytes that a device needs for some plan to fit, to about 1 %; found by bisection."""
    low = float(max(pool.memory_bytes for pool in pools))
    high = low
    for _ in range(12):
        high *= 2
        if _fits(problem, pools, modes, high):
            break
    else:
        return None
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _fits(problem, pools, modes, middle) else (middle, high)
    return high


def _fits(problem: Problem, pools: Sequence[Pool], modes: Sequence[Mode], memory: float) -> bool:
    larger = [replace(pool, memory_bytes=int(memory)) for pool in pools]
    return bool(Search(problem, larger, tolerance=0.1).best(modes))
