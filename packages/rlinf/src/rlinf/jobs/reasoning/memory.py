"""Whether a reasoning recipe's model fits: what each rank of its workers will hold, before any of them starts.

`rlinf_sched.derive.memory` has the formulas, and the spec of each training backend and engine says how it is counted.
`rlinf plan` plans with these numbers and `rlinf train` refuses by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from rlinf.config.reasoning import ReasoningConfig
from rlinf.jobs.reasoning.shapes import job_shape, reference_shape
from rlinf.jobs.reasoning.smaller import check_fits
from rlinf.planning.memory import ALLOCATED_SHARE, CONTEXT_BYTES, Load, MemoryPool, PlanMemory, device_place
from rlinf.plugin_checks import spec_of
from rlinf_sched import Cluster, Plan, StagePlan
from rlinf_sched.derive import Gpu, JobShape, ModelShape, RankMemory, forward_memory
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.trainers import DTYPE_BYTES
from rlinf_workers.weight_sync import EdgeEnds, suitable_weight_syncs

NUM_STORED = 2
"""Copies of the weights that the host's store between trainer and engines takes at most: the version that is served,
and the next."""


def rank_memory(
    config: ReasoningConfig, shape: ModelShape, job: JobShape, num_ranks: Mapping[str, int]
) -> dict[str, RankMemory]:
    """Worker group -> what one of its ranks holds. Raises: as `reference_shape`."""
    trainer, reference = config.actor.trainer_spec, reference_shape(config, shape)
    memory = {
        "rollout": config.rollout.engine_spec.memory(shape, job),
        "actor": trainer.rank_memory(shape, job, num_ranks.get("actor", 1)),
    }
    return memory if reference is None else {**memory, "reference": forward_memory(reference, trainer.computed(job))}


def loads_of(
    config: ReasoningConfig,
    shape: ModelShape,
    plan: Plan,
    *,
    on_gpu: bool = True,
    device_bytes: int = 0,
    host_bytes: int = 0,
) -> list[Load]:
    """The load of every rank of the plan that has a model; `device_bytes` as in `job_shape`.

    Args:
        host_bytes: memory of the machine, for an engine on CPU slots that takes a share of it.
    """
    job = job_shape(config, on_gpu=on_gpu, device_bytes=device_bytes)
    under_way = _most_at_once(config, job, plan.stage("rollout")) * job.lengths.group_size
    job = replace(job, host_bytes=host_bytes, under_way=under_way)
    engine, trainer = config.rollout.engine_spec, config.actor.trainer_spec
    span = trainer.num_ranks_of_replica(job)  # the planner's plans have a rank for each replica
    ranks = {stage.stage: stage.num_replicas * span if span > 1 else stage.num_ranks for stage in plan.stages}
    of_group = rank_memory(config, shape, job, ranks)
    loads = []
    for stage in plan.stages:
        if (memory := of_group.get(stage.stage)) is None:
            continue
        num_items = _most_at_once(config, job, stage)
        num_devices = job.tensor_parallel if stage.stage == "rollout" else 1
        for rank in range(stage.num_ranks):
            load = Load(
                group=stage.stage,
                memory=memory,
                num_items=num_items,
                offload=stage.offload,
                devices=stage.devices_of(rank)[:num_devices],  # where a rank has more, it computes on the first
                engine_process_bytes=num_devices * engine.process_bytes if stage.stage == "rollout" else 0,
            )
            loads.append(load)
    return loads


def _most_at_once(config: ReasoningConfig, job: JobShape, stage: StagePlan) -> int:
    """Prompts with `group_size` completions each, in training or, in other words, evaluation."""
    size, num_samples = job.lengths.group_size, config.evaluation.num_samples
    is_bounded = not config.rollout.engine_spec.fills_its_memory(config.rollout.engine_options)
    most = 0
    for num_prompts, num_rows in ((job.num_groups, size), (config.task.num_held_out, num_samples)):
        share = -(-num_prompts // stage.num_replicas)
        bounded = min(stage.granularity or share, share, max(1, job.max_sequences // num_rows))
        at_once = bounded if stage.stage != "rollout" or is_bounded else share
        most = max(most, -(-at_once * num_rows // size))
    return most


def fullest_place(
    config: ReasoningConfig, shape: ModelShape, plan: Plan, cluster: Cluster, memory_bytes: int
) -> MemoryPool:
    """The device that has least to spare; the host where the devices are CPU slots, on which offloading leaves
    everything where it is."""
    on_gpu = cluster.devices[0].kind == "cuda"
    device_bytes = cluster.devices[0].memory_bytes
    loads = loads_of(config, shape, plan, on_gpu=on_gpu, device_bytes=device_bytes, host_bytes=memory_bytes)
    if not on_gpu:
        needed = sum(load.process for load in loads) + stored_bytes(shape, config)
        who = f"the {len(loads)} processes need"
        return MemoryPool(
            name="this machine", has_bytes=memory_bytes, needed_bytes=needed, loads=tuple(loads), needs=who
        )
    mailbox = mailbox_bytes(config, shape, plan, cluster)
    places = [
        device_place(
            f"{device.name} (device {index})", device.memory_bytes, [x for x in loads if index in x.devices], mailbox
        )
        for index, device in enumerate(cluster.devices)
    ]
    return max(places, key=lambda place: place.missing_bytes)


def mailbox_bytes(config: ReasoningConfig, shape: ModelShape, plan: Plan, cluster: Cluster) -> int:
    """What a rank of the actor keeps on its GPU of a published version until the servers have taken it: its share of
    what is served or, between machines, of what it trains. 0 where weights go another way than through device memory.
    """
    name, num_ranks = config.cluster.weight_sync, plan.stage("actor").num_ranks
    nodes = sorted({cluster.devices[index].node for stage in plan.stages for index in stage.devices})
    ends = EdgeEnds(sources=nodes, targets=nodes, on_gpus=True)
    spec = suitable_weight_syncs(ends)[0] if name == "auto" else spec_of(WEIGHT_SYNCS, name, at="cluster.weight_sync")
    return spec.gpu_bytes(
        trained_bytes=DTYPE_BYTES["float32"] * shape.num_parameters // num_ranks,
        served_bytes=DTYPE_BYTES[config.served_dtype] * shape.num_parameters // num_ranks,
        options=config.cluster.weight_sync_options,
    )


def all_fit_at_once(config: ReasoningConfig, shape: ModelShape, plan: Plan, cluster: Cluster) -> bool:
    """Whether every device has room for the peaks of all its ranks together, so that no state has to leave it. False
    where a role is not counted: a teacher of a kind that we do not know."""
    loads = loads_of(config, shape, plan, device_bytes=cluster.devices[0].memory_bytes)
    is_counted = {load.group for load in loads} >= {stage.stage for stage in plan.stages if stage.devices}
    mailbox = mailbox_bytes(config, shape, plan, cluster)
    return is_counted and all(
        sum(ALLOCATED_SHARE * load.peak + CONTEXT_BYTES for load in loads if index in load.devices) + mailbox
        <= device.memory_bytes
        for index, device in enumerate(cluster.devices)
    )


def check_memory(config: ReasoningConfig, shape: ModelShape, plan: Plan, cluster: Cluster, memory_bytes: int) -> None:
    """Whether the plan's ranks fit their devices, or all of them the host where the devices are CPU slots.

    Raises: UserError with what each needs, what there is, and which settings would fit.
    """
    actor, rollout = plan.stage("actor"), plan.stage("rollout")
    device = cluster.devices[0]
    room = min(len(actor.devices), config.rollout.num_prompts // config.algorithm.num_minibatches)
    most_ranks = max((count for count in range(1, room + 1) if len(actor.devices) % count == 0), default=1)

    def place_of(changed: ReasoningConfig) -> MemoryPool:
        num_ranks, size = actor.num_ranks, changed.replica_sizes.get("actor", 1)
        if size != config.replica_sizes.get("actor", 1):
            num_ranks = _ranks_in_replicas(changed, size, len(actor.devices))
        elif changed.actor.resolved_shards > config.actor.resolved_shards:
            num_ranks = changed.actor.resolved_shards
        trains = replace(actor, num_ranks=num_ranks, num_ranks_per_replica=size)
        span, before = changed.rollout.tensor_parallel_size, config.rollout.tensor_parallel_size
        generates = rollout if span == before else replace(rollout, num_ranks=len(rollout.devices) // span)
        stages = (trains if stage is actor else generates if stage is rollout else stage for stage in plan.stages)
        return fullest_place(changed, shape, replace(plan, stages=tuple(stages)), cluster, memory_bytes)

    check_fits(
        config,
        shape,
        place_of,
        partial(job_shape, on_gpu=device.kind == "cuda", device_bytes=device.memory_bytes),
        num_ranks=actor.num_ranks,
        most_ranks=max(actor.num_ranks, most_ranks),
        num_devices=len(actor.devices),
        num_engine_devices=len(rollout.devices),
    )


def check_gpu(config: ReasoningConfig, shape: ModelShape, gpu: Gpu, num_devices: int) -> None:
    """Whether each worker group alone fits GPUs that need not be there, spread over all. Raises: as `check_memory`."""
    job_of = partial(job_shape, device_bytes=gpu.memory_bytes)

    def place_of(changed: ReasoningConfig) -> MemoryPool:
        job = job_of(changed)
        size = changed.actor.trainer_spec.num_ranks_of_replica(job)
        ranks = {"actor": _ranks_in_replicas(changed, size, num_devices)}
        memory_of = rank_memory(changed, shape, job, ranks)
        alone = [Load(group=group, memory=memory, num_items=1, offload=True) for group, memory in memory_of.items()]
        places = [device_place(gpu.name, gpu.memory_bytes, [load]) for load in alone]
        return max(places, key=lambda place: place.missing_bytes)

    check_fits(
        config,
        shape,
        place_of,
        job_of,
        num_ranks=math.gcd(config.actor.resolved_shards, num_devices),
        most_ranks=num_devices,
        num_devices=num_devices,
        num_engine_devices=num_devices,
    )


def _ranks_in_replicas(config: ReasoningConfig, size: int, num_devices: int) -> int:
    """Ranks of an actor whose replicas have so many: as many replicas as devices and shards allow."""
    return math.gcd(config.actor.resolved_shards, max(1, num_devices // size)) * size


def stored_bytes(shape: ModelShape, config: ReasoningConfig) -> int:
    """Bytes of the store of weights between trainer and engines, which the processes share."""
    return NUM_STORED * DTYPE_BYTES[config.served_dtype] * shape.num_parameters


@dataclass(frozen=True)
class ReasoningMemory(PlanMemory):
    """Memory use of a reasoning run on its devices."""

    config: ReasoningConfig
    shape: ModelShape
    cluster: Cluster
    host_bytes: int

    def check(self, plan: Plan) -> None:
        check_memory(self.config, self.shape, plan, self.cluster, self.host_bytes)

    def all_fit_at_once(self, plan: Plan) -> bool:
        is_gpu = self.cluster.devices[0].kind == "cuda"
        return is_gpu and all_fit_at_once(self.config, self.shape, plan, self.cluster)

    def fullest_place(self, plan: Plan) -> MemoryPool:
        return fullest_place(self.config, self.shape, plan, self.cluster, self.host_bytes)
