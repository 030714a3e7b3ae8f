"""Random problems that are too large to enumerate: three to six stages on 16 to 128 devices, for attack.py.

Their shapes are what recipes have and small random problems lack: chains, forks, a simulator and its policy in a cycle,
a stage on the host, two products of devices, a trainer whose worker group also makes a pass before.
"""

from __future__ import annotations

import random
from dataclasses import replace

from rlinf_sched import (
    Cluster,
    FlowGraph,
    InstanceProfile,
    ItemCosts,
    Links,
    Problem,
    Profiles,
    Stage,
    StageProfile,
    TimePoint,
    WeightEdge,
)

GIB = 1 << 30
KINDS = ("chain", "fork", "cycle", "host", "two products", "shared group")
NUM_DEVICES = (16, 32, 64, 128)
SPANS = ((1, 2, 4, 8), (1, 2, 4), (2, 4, 8), (1,), (2, 4), (1, 4), (4, 8))
"""Devices that an instance of a worker group may span."""
ROOMY_GIB, TIGHT_GIB = (5, 15, 30, 60), (30, 60, 70)
"""State of a worker group on the first of its spans; a device has 80 GiB."""


def random_problem(seed: int) -> Problem:
    """The problem of that number; 24 in a row have each kind with each number of devices."""
    draw = random.Random(seed)
    kind, num_devices = KINDS[seed % len(KINDS)], NUM_DEVICES[seed // len(KINDS) % len(NUM_DEVICES)]
    num_rounds = draw.choice((5, 10, 20))
    flow = _flow(draw, kind, draw.randint(4 if kind == "shared group" else 3, 6))
    spans = {worker: draw.choice(SPANS) for worker in flow.workers}
    states = TIGHT_GIB if draw.random() < 0.5 else ROOMY_GIB
    cycle = flow.cycles()[0] if flow.cycles() else ()
    profiles = {}
    for stage in flow.stages:
        rounds = num_rounds if stage.name in cycle else 1
        products = _products(draw, kind)
        profile = (
            _on_devices(
                draw, stage, spans[stage.worker], rounds, draw.choice(states), products, stage is flow.stages[0]
            )
            if stage.needs_device
            else _on_host(draw)
        )
        if stage.needs_device and len(flow.workers[stage.worker]) == 1:
            profile = replace(profile, max_instances=draw.choice((0, 0, 0, num_devices // 4)))
        profiles[stage.name] = profile
    return Problem(
        flow=replace(flow, name=f"{kind} {seed}"),
        profiles=Profiles(stages=profiles),
        cluster=_cluster(kind, num_devices, draw.choice((None, 9.4e9))),
        num_items=draw.choice((64, 96, 128, 200, 256, 384, 512)),
    )


def _cluster(kind: str, num_devices: int, sync_bytes_per_s: float | None) -> Cluster:
    cluster = Cluster.cuda_nodes(num_devices // 8, 8, name="H100", memory_bytes=80 * GIB)
    devices = cluster.devices
    if kind == "two products":
        half = num_devices // 2
        devices = (*devices[:half], *(replace(device, name="A100") for device in devices[half:]))
    return Cluster(devices=devices, links=Links(sync_bytes_per_s=sync_bytes_per_s))


def _flow(draw: random.Random, kind: str, num_stages: int) -> FlowGraph:
    """The last stage trains, sometimes the one before too; each stage reads one or two before it."""
    first = 2 if kind == "cycle" else 1
    sources = {i: [i - 1] for i in range(first, num_stages)}
    if kind in ("fork", "two products", "shared group"):
        sources = {i: sorted(draw.sample(range(i), min(i, draw.choice((1, 1, 2))))) for i in sources}
    on_host = draw.randrange(1, num_stages - 1) if kind == "host" or (kind == "fork" and num_stages > 3) else None
    trains = {num_stages - 1}
    if num_stages > 4 and draw.random() < 0.35:
        trains.add(num_stages - 2)
    trains.discard(on_host if on_host is not None else -1)
    workers = [f"s{i}" for i in range(num_stages)]
    if kind == "shared group":
        workers[draw.randrange(1, num_stages - 2)] = workers[-1]
    stages = []
    for i in range(num_stages):
        reads = [f"{k}-{i}" for k in sources[i]] if i >= first else []
        writes = [f"{i}-{k}" for k, of in sources.items() if i in of]
        if i < first:
            reads, cycle_writes = (["in"], []) if first == 1 else [(["actions"], ["seen"]), (["seen"], ["actions"])][i]
            writes = [*cycle_writes, *writes]
        env = kind == "cycle" and i == 0
        stage = Stage(
            name=f"s{i}",
            worker=workers[i],
            role="actor" if i in trains else "env" if env else "rollout",
            reads=tuple(reads),
            writes=tuple(writes),
            trains=i in trains,
            needs_device=i != on_host,
            whole_batch=i in trains and draw.random() < 0.2,
            item_multiple=draw.choice((1, 1, 1, 2, 4)) if i in trains else 1,
            dispatch="key" if env else "any",
        )
        stages.append(stage)
    channels = [channel for stage in stages for channel in stage.reads if channel != "in"]
    return FlowGraph(
        name=kind,
        stages=tuple(stages),
        feeds=("in",) if first == 1 else (),
        weight_edges=(WeightEdge(source=workers[-1], target=workers[first - 1]),),
        item_bytes={name: draw.choice((1 << 16, 1 << 20, 16 << 20)) for name in channels if draw.random() < 0.5},
    )


def _products(draw: random.Random, kind: str) -> dict[str, float]:
    """Product of devices that the stage was profiled on -> its times as a multiple of an A100's; "": on any."""
    if kind != "two products":
        return {"": 1.0}
    if draw.random() < 0.75:
        return {"A100": 1.0, "H100": draw.uniform(0.35, 0.6)}
    return {draw.choice(("A100", "H100")): 0.6}


def _on_host(draw: random.Random) -> StageProfile:
    points = (TimePoint(num_items=1, seconds=draw.choice((0.02, 0.1, 0.5, 2.0))),)
    return StageProfile(
        instances=(InstanceProfile(num_devices=0, points=points),), max_instances=draw.choice((0, 8, 32, 64))
    )


def _on_devices(
    draw: random.Random,
    stage: Stage,
    spans: tuple[int, ...],
    rounds: int,
    state_gib: int,
    products: dict[str, float],
    generates: bool,
) -> StageProfile:
    item_s = draw.uniform(0.2, 4) * (3 if generates else 1) / rounds
    fixed_s = draw.choice((0, 0.5, 2, 8, 20)) * draw.random() / rounds
    power = draw.uniform(0.75, 1.02)
    batchings = ("sum",) if stage.trains else ("sum", "longest") if rounds > 1 else ("sum", "longest", "continuous")
    batching = draw.choice(batchings)
    most, slope = (32, draw.choice((0.02, 0.1, 0.3))) if batching == "continuous" else (64, draw.uniform(0.6, 1.0))
    spread = ItemCosts()
    if rounds == 1 and draw.random() < 0.75:
        spread = ItemCosts(spread="lognormal", sigma=draw.uniform(0.3, 1.0), longest=draw.choice((None, 4)))
    base = InstanceProfile(
        points=(),
        max_items=draw.choice((0, 0, 8, 32)) if batching == "continuous" else 0,
        step_s=draw.choice((0, 0.5, 3)) if stage.trains else 0.0,
        sharded_state_bytes=draw.choice((0, 0, 120, 400)) * GIB if stage.trains else 0,
        work_bytes=draw.choice((0, 5)) * GIB,
    )
    item_work_bytes = draw.choice((0, 0, 200 << 20))
    instances = []
    for product, multiple in products.items():
        for span in spans:
            faster = multiple / span**power
            times = ((1, fixed_s + item_s), (most, fixed_s + item_s * (1 + (most - 1) * slope)))
            instance = replace(
                base,
                num_devices=span,
                device_name=product,
                points=tuple(TimePoint(num_items=n, seconds=seconds * faster) for n, seconds in times),
                state_bytes=state_gib * GIB // span,
                item_work_bytes=item_work_bytes // span,
            )
            instances.append(instance)
    return StageProfile(
        instances=tuple(instances),
        batching=batching,
        costs=spread,
        rounds=rounds,
        weights_bytes=draw.choice((15, 60)) * GIB,
    )
