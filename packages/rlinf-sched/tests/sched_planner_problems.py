"""Small problems for tests of the planner: round times, one knob each."""

from collections.abc import Mapping
from typing import Any

from rlinf_sched import (
    Cluster,
    FlowGraph,
    InstanceProfile,
    Problem,
    Profiles,
    Stage,
    StageProfile,
    TimePoint,
    WeightEdge,
)

GIB = 1 << 30
MODES = ("collocated", "disaggregated", "hybrid")


def profile(seconds: float, *, batching: Any = "sum", rounds: int = 1, fixed: float = 0.0, **more: Any) -> StageProfile:
    """`fixed` and `seconds` for each item; `more` goes to the one instance."""
    points = (TimePoint(num_items=1, seconds=fixed + seconds), TimePoint(num_items=64, seconds=fixed + 64 * seconds))
    instance = InstanceProfile(points=points, **more)
    return StageProfile(instances=(instance,), batching=batching, rounds=rounds, weights_bytes=GIB)


def gpus(num_devices: int, gib: int = 80) -> Cluster:
    """A cluster of equal GPUs in nodes of eight."""
    per_node = min(num_devices, 8)
    return Cluster.cuda_nodes(num_devices // per_node, per_node, name="GPU", memory_bytes=gib * GIB)


def chain(
    profiles: Mapping[str, StageProfile],
    cluster: Cluster,
    *,
    num_items: int = 16,
    max_staleness: int = 0,
    workers: Mapping[str, str] | None = None,
    **more: Any,
) -> Problem:
    """Stages one after the other; the last trains, and its weights go to the first."""
    names = list(profiles)
    workers = workers or {}
    stages = tuple(
        Stage(
            name=name,
            worker=workers.get(name, name),
            role="actor" if name == names[-1] else "rollout",
            reads=(f"to-{name}",),
            writes=tuple(f"to-{other}" for other in names[i + 1 : i + 2]),
            trains=name == names[-1],
            needs_device=bool(profiles[name].instances[0].num_devices),
        )
        for i, name in enumerate(names)
    )
    source, target = (workers.get(name, name) for name in (names[-1], names[0]))
    flow = FlowGraph(
        name="chain",
        stages=stages,
        weight_edges=(WeightEdge(source=source, target=target),) if source != target else (),
        feeds=(f"to-{names[0]}",),
        max_staleness=max_staleness,
    )
    return Problem(flow=flow, profiles=Profiles(stages=dict(profiles)), cluster=cluster, num_items=num_items, **more)


def ppo(num_devices: int, num_items: int = 512) -> Problem:
    """Rollout in continuous batches, reference, reward on the host, critic, actor: 1,024 devices have work for all."""
    profiles = {
        "rollout": profile(0.5, batching="continuous", fixed=5.0, max_items=32, state_bytes=15 * GIB),
        "reference": profile(0.2, state_bytes=15 * GIB),
        "reward": profile(0.001, num_devices=0),
        "critic": profile(0.4, state_bytes=30 * GIB),
        "actor": profile(0.8, step_s=0.5, state_bytes=10 * GIB, sharded_state_bytes=100 * GIB),
    }
    return chain(profiles, gpus(num_devices), num_items=num_items)
