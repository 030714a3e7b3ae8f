"""Generated problems small enough to try everything: stages that read from one or two others, two of them perhaps a
cycle, on one node."""

from dataclasses import replace

from hypothesis import strategies as st

from rlinf_sched import (
    Cluster,
    FlowGraph,
    InstanceProfile,
    ItemCosts,
    Problem,
    Profiles,
    Stage,
    StageProfile,
    TimePoint,
    WeightEdge,
)

GIB = 1 << 30
MOST_DEVICES = {2: 8, 3: 8, 4: 6, 5: 4, 6: 3}
"""Number of stages -> most devices with which keeping every candidate takes about a second."""


@st.composite
def problems(
    draw: st.DrawFn, most_devices: dict[int, int] = MOST_DEVICES, *, least_devices: int = 1, many_choices: bool = False
) -> Problem:
    """Random problems with as many stages as `most_devices` has keys for.

    The stages of larger flows have fewer choices, except with `many_choices`.

    Numbers are drawn from few different ones, so that candidates are often equal.
    """
    flow = draw(_flows(sorted(most_devices)))
    most = most_devices[len(flow.stages)]
    num_devices = most - draw(st.integers(0, most - least_devices))
    num_items = draw(st.sampled_from([4, 3, 6, 1]))
    rounds = draw(st.integers(2, 4))
    in_cycle = {name for cycle in flow.cycles() for name in cycle}
    profiles = {
        stage.name: draw(_profiles(num_devices, rounds if stage.name in in_cycle else 1)) for stage in flow.stages
    }
    many_choices = many_choices or len(flow.stages) <= 4
    common = draw(st.sampled_from([(1, 0), (1, 2, 0), (0,)] if many_choices else [(0,), (1,)]))
    sizes = st.sampled_from([common, common, (2, 0)]) if many_choices else st.just(common)
    limits = [{"granularities": draw(sizes), "num_parts": draw(st.sampled_from([0, 0, 0, 4]))} for _ in flow.stages]
    flow = replace(
        flow, stages=tuple(replace(stage, **limit) for stage, limit in zip(flow.stages, limits, strict=True))
    )
    pinned = draw(st.sampled_from([{}, {}, {}, {draw(st.sampled_from(flow.stages)).worker: min(2, num_devices)}]))
    return Problem(
        flow=flow,
        profiles=Profiles(stages=profiles),
        cluster=Cluster.cuda_nodes(
            1, num_devices, name="GPU", memory_bytes=draw(st.sampled_from([1000, 48, 24])) * GIB
        ),
        num_items=num_items,
        pinned_devices=pinned,
        allow_offload=draw(st.booleans()) and (many_choices or num_devices <= 2),
    )


@st.composite
def _flows(draw: st.DrawFn, numbers_of_stages: list[int]) -> FlowGraph:
    num_stages = draw(st.sampled_from(numbers_of_stages))
    env = draw(st.one_of(st.none(), st.integers(0, num_stages - 2)))  # forms a cycle with the stage after it
    reads: list[tuple[str, ...]] = []
    for i in range(num_stages):
        sources = draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=2)) if i else set()
        if env is not None and i == env + 1:
            sources |= {env}
        channels = [f"c{source}-{i}" for source in sorted(sources)]
        if i == env:
            channels += [f"c{i + 1}-{i}"]
        begins_itself = i == env and draw(st.booleans())
        reads.append(tuple(channels) if i or begins_itself else ("feed", *channels))
    channels = [channel for some in reads for channel in some]
    trains = [draw(st.booleans()) for _ in range(num_stages)]
    stages = tuple(
        Stage(
            name=f"s{i}",
            worker=f"s{i}",
            role="env" if i == env else "actor" if trains[i] else "rollout",
            reads=reads[i],
            writes=tuple(channel for channel in channels if channel.startswith(f"c{i}-")),
            trains=trains[i],
        )
        for i in range(num_stages)
    )
    trainers, others = ([f"s{i}" for i in range(num_stages) if trains[i] == which] for which in (True, False))
    return FlowGraph(
        name="flow",
        stages=stages,
        weight_edges=(WeightEdge(source=trainers[0], target=others[0]),) if trainers and others else (),
        feeds=("feed",) if "feed" in channels else (),
        item_bytes={channel: draw(st.sampled_from([0, 10**8])) for channel in channels},
        max_staleness=draw(st.sampled_from([0, 0, 0, 1])),
    )


@st.composite
def _profiles(draw: st.DrawFn, num_devices: int, rounds: int) -> StageProfile:
    slope, fixed = draw(st.sampled_from([1.0, 2.0])), draw(st.sampled_from([0.0, 1.0]))
    instance = InstanceProfile(
        num_devices=draw(st.sampled_from([1, 1, min(2, num_devices)])),
        points=(TimePoint(num_items=1, seconds=fixed + slope), TimePoint(num_items=4, seconds=fixed + 4 * slope)),
        max_items=draw(st.sampled_from([0, 0, 0, 2])),
        step_s=draw(st.sampled_from([0.0, 0.5])),
        state_bytes=draw(st.sampled_from([0, 10 * GIB])),
        sharded_state_bytes=draw(st.sampled_from([0, 20 * GIB])),
        item_work_bytes=draw(st.sampled_from([0, GIB])),
        onload_s=draw(st.sampled_from([None, None, 0.5])),
    )
    return StageProfile(
        instances=draw(
            st.sampled_from([(instance,), (instance,), _at_two_numbers(instance), _at_two_widths(instance)])
        ),
        batching=draw(st.sampled_from(["sum", "longest", "continuous"])),
        costs=draw(st.sampled_from([ItemCosts(), ItemCosts(spread="lognormal", sigma=0.5)])),
        rounds=rounds,
        max_instances=draw(st.sampled_from([0, 0, 0, 1, 3])),
        weights_bytes=draw(st.sampled_from([0, 10 * GIB])),
    )


def _at_two_numbers(instance: InstanceProfile) -> tuple[InstanceProfile, InstanceProfile]:
    """Measured alone, and slower as one of three."""
    slower = tuple(replace(point, seconds=1.5 * point.seconds) for point in instance.points)
    return replace(instance, num_ranks=1), replace(instance, num_ranks=3, points=slower)


def _at_two_widths(instance: InstanceProfile) -> tuple[InstanceProfile, InstanceProfile]:
    """The instance, and a faster one on twice the devices."""
    faster = tuple(replace(point, seconds=0.6 * point.seconds) for point in instance.points)
    return instance, replace(instance, num_devices=2 * instance.num_devices, points=faster)
