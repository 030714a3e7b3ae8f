"""Random flows of unequal stages with four widths each, whose planning time is measured."""

import random

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
WIDTHS = (1, 2, 4, 8)


def random_graph(num_stages: int, num_devices: int, *, seed: int, num_items: int = 1024) -> Problem:
    """Each stage reads from one or two before it; the last trains, with weights for the first."""
    draw = random.Random(seed)
    sources = {i: sorted(draw.sample(range(i), min(i, draw.choice([1, 1, 2])))) for i in range(1, num_stages)}
    stages = tuple(
        Stage(
            name=f"s{i}",
            worker=f"s{i}",
            role="actor" if i == num_stages - 1 else "rollout",
            reads=tuple(f"{k}-{i}" for k in sources[i]) if i else ("in",),
            writes=tuple(f"{i}-{k}" for k, of in sources.items() if i in of),
            trains=i == num_stages - 1,
        )
        for i in range(num_stages)
    )
    flow = FlowGraph(
        name=f"random-{num_stages}",
        stages=stages,
        feeds=("in",),
        weight_edges=(WeightEdge(source=stages[-1].name, target="s0"),),
    )
    return Problem(
        flow=flow,
        profiles=Profiles(stages={stage.name: _profile(draw, stage.trains) for stage in stages}),
        cluster=Cluster.cuda_nodes(num_devices // 8, 8, name="GPU", memory_bytes=80 * GIB),
        num_items=num_items,
    )


def _profile(draw: random.Random, trains: bool) -> StageProfile:
    seconds, fixed, state = draw.uniform(0.3, 5), draw.uniform(0, 10), draw.choice([10, 30, 60]) * GIB
    speedups = [width ** draw.uniform(0.7, 0.95) for width in WIDTHS]
    return StageProfile(
        instances=tuple(
            InstanceProfile(
                num_devices=width,
                points=tuple(TimePoint(num_items=n, seconds=(fixed + seconds * n) / speedup) for n in (1, 64)),
                state_bytes=state // width,
                step_s=0.5 * trains,
            )
            for width, speedup in zip(WIDTHS, speedups, strict=True)
        ),
        batching="sum" if trains else draw.choice(["sum", "longest", "continuous"]),
        costs=ItemCosts(spread="lognormal", sigma=draw.uniform(0.3, 0.9)),
        weights_bytes=15 * GIB,
    )
