"""Random problems with random valid plans: flows of two to six stages, cycles, shared devices, every batching."""

from dataclasses import replace

from hypothesis import strategies as st

from rlinf_sched import (
    Cluster,
    FlowGraph,
    InstanceProfile,
    ItemCosts,
    Links,
    Plan,
    Problem,
    Profiles,
    Stage,
    StagePlan,
    StageProfile,
    TimePoint,
    WeightEdge,
)

EIGHTHS = st.integers(1, 40).map(lambda n: n / 8)


@st.composite
def flows(draw) -> FlowGraph:
    num_stages = draw(st.integers(2, 6))
    reads = [set() for _ in range(num_stages)]
    writes = [{f"c{i}"} for i in range(num_stages)]
    feeds = {"in"}
    reads[0].add("in")
    for i in range(1, num_stages):
        for j in draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=2)):
            reads[i].add(f"c{j}")
    if draw(st.booleans()):  # a way back makes a cycle of what lies between
        end = draw(st.integers(0, num_stages - 2))
        start = draw(st.integers(0, end))
        writes[end].add("back")
        reads[start].add("back")
        if draw(st.booleans()) and start == 0:
            feeds, reads[0] = set(), reads[0] - {"in"}
    read = set().union(*reads)
    stages = tuple(
        Stage(
            name=f"s{i}",
            worker=f"w{i}",
            role="actor" if i == num_stages - 1 else "rollout" if i or feeds else "env",  # env: begins by itself
            reads=tuple(sorted(reads[i])),
            writes=tuple(sorted(writes[i])),
            dispatch=draw(st.sampled_from(["any", "any", "key"])),
            trains=i == num_stages - 1,
            needs_device=draw(st.integers(0, 5)) > 0,
        )
        for i in range(num_stages)
    )
    synced = draw(st.sets(st.integers(0, num_stages - 2), max_size=2))
    return FlowGraph(
        name="f",
        stages=stages,
        feeds=tuple(feeds),
        weight_edges=tuple(WeightEdge(source=f"w{num_stages - 1}", target=f"w{i}") for i in sorted(synced)),
        collects=tuple(sorted(channel for channels in writes for channel in channels if channel not in read)),
        item_bytes={channel: draw(st.integers(0, 3)) for channel in sorted(read) if draw(st.booleans())},
        max_staleness=draw(st.sampled_from([0, 0, 0, 1, 2])),
    )


@st.composite
def _profiles(draw, stage: Stage, rounds: int, span: int) -> StageProfile:
    points = [TimePoint(num_items=1, seconds=draw(EIGHTHS))]
    if draw(st.booleans()):
        points.append(TimePoint(num_items=draw(st.sampled_from([2, 5])), seconds=points[0].seconds + draw(EIGHTHS)))
    if draw(st.booleans()):
        points = [TimePoint(num_items=p.num_items + 1, seconds=p.seconds) for p in points]
    costs = draw(
        st.sampled_from(
            [ItemCosts(), ItemCosts(spread="samples", samples=(1, 2, 5)), ItemCosts(spread="lognormal", sigma=0.7)]
        )
    )
    return StageProfile(
        instances=(
            InstanceProfile(
                num_devices=span,
                points=tuple(points),
                max_items=draw(st.sampled_from([0, 0, 2, 3])),
                step_s=draw(st.sampled_from([0.0, 0.5, 2.0])),
                state_bytes=draw(st.integers(0, 20)),
                work_bytes=draw(st.integers(0, 5)),
                item_work_bytes=draw(st.integers(0, 2)),
                onload_s=draw(st.sampled_from([None, 0.0, 0.25])),
                offload_s=draw(st.sampled_from([None, 0.0, 0.5])),
            ),
        ),
        batching=draw(st.sampled_from(["sum", "longest", "continuous"])),
        costs=costs,
        rounds=rounds,
        weights_bytes=draw(st.integers(0, 4)),
    )


@st.composite
def problems(
    draw, *, max_staleness: int | None = None, on_host: bool = False, crowded: bool = False
) -> tuple[Problem, Plan]:
    """Any; or those that have what is seldom drawn.

    Args:
        max_staleness: this one, with weights that are synced, and few items.
        on_host: one stage is on the host, in several instances.
        crowded: the first stage consists of engines with room for a part of their items only.
    """
    flow = draw(flows())
    if max_staleness is not None:
        edges = flow.weight_edges or (WeightEdge(source=flow.stages[-1].worker, target="w0"),)
        flow = replace(flow, max_staleness=max_staleness, weight_edges=edges)
    host = draw(st.sampled_from(flow.stages)).name if on_host else ""
    flow = replace(flow, stages=tuple(replace(s, needs_device=s.needs_device and s.name != host) for s in flow.stages))
    engines = flow.stages[0].name if crowded else ""
    num_devices = draw(st.integers(1, 4))
    cluster = Cluster.cuda_nodes(draw(st.integers(1, 2)), num_devices, name="gpu", memory_bytes=1 << 40)
    links = Links(node_bytes_per_s=16, network_bytes_per_s=8, host_bytes_per_s=8, latency_s=draw(EIGHTHS) / 16)
    cluster = Cluster(devices=cluster.devices, links=links)
    in_cycle = {name for cycle in flow.cycles() for name in cycle}
    rounds = draw(st.integers(1, 3))
    num_items = draw(st.integers(5 if crowded else 1, 9 if max_staleness is None else 5))  # there many steps are run
    plans, profiles = [], {}
    for turn, names in enumerate(flow.turns()):
        for name in names:
            stage, devices, span = flow.stage(name), (), 0
            num_ranks = draw(st.integers(1 if name != host else 2, 3 if name != engines else 2))
            if stage.needs_device:
                first = draw(st.integers(0, cluster.num_devices - 1))
                devices = tuple(range(first, draw(st.integers(first, cluster.num_devices - 1)) + 1))
                divisors = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
                counts = [n for n in [*divisors, 2 * len(devices)] if n <= 2 or name != engines]
                num_ranks = draw(st.sampled_from(counts))
                span = max(1, len(devices) // num_ranks)
            plans.append(
                StagePlan(
                    stage=name,
                    devices=devices,
                    num_ranks=num_ranks,
                    granularity=draw(st.integers(1, 4) if name in in_cycle else st.integers(0, 4)),
                    offload=draw(st.booleans()) and bool(devices),
                    turn=turn,
                )
            )
            profiles[name] = draw(_profiles(stage, rounds if name in in_cycle else 1, span))
            if name == engines:
                instance = replace(profiles[name].instances[0], max_items=draw(st.integers(1, 2)))
                profiles[name] = replace(profiles[name], batching="continuous", instances=(instance,))
    problem = Problem(flow=flow, profiles=Profiles(stages=profiles), cluster=cluster, num_items=num_items)
    return problem, Plan(flow="f", mode="hybrid", stages=tuple(plans), reason="generated")
