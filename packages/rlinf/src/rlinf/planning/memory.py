"""Whether a reasoning recipe's model fits: what each rank of its workers will hold, before any of them starts.

`rlinf_sched.derive.memory` has the formulas, and the spec of each training backend and engine says how it is counted.
`rlinf plan` plans with these numbers and
`rlinf train` refuses by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.planning.engines import can_be_served, pool_shortage
from rlinf.planning.fitting import fitting_changes, hint_of
from rlinf.plugin_checks import spec_of
from rlinf_sched import Cluster, Plan, ProfileError, StagePlan
from rlinf_sched.derive import (
    MEAN_SHARE_OF_LIMIT,
    Adapter,
    Gpu,
    JobShape,
    Lengths,
    ModelShape,
    RankMemory,
    forward_memory,
    resolve_model,
)
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.trainers import DTYPE_BYTES
from rlinf_workers.weight_sync import EdgeEnds, suitable_weight_syncs

PROCESS_BYTES = 384 << 20
"""Bytes that a worker process on a CPU slot takes beside its model: the interpreter with torch and transformers, as
measured in the reference's process (benchmarks/results/memory.json)."""
HEAP_SHARE = 0.4
"""Freed blocks that malloc keeps in such a process, as a share of the memory that comes and goes and of the optimizer's
moments, which are allocated in between; chosen so that no worker in the same measurements takes more."""
ALLOCATED_SHARE = 1.25
"""What torch's allocator takes of a GPU over what is in use, while nobody asks it to give back; up to 1.21 was measured
(docs/memory.md)."""
CONTEXT_BYTES = 1 << 30
"""Room for CUDA's own memory in each process: its context, kernels and workspaces."""
NUM_STORED = 2
"""Copies of the weights that the host's store between trainer and engines takes at most: the version that is served,
and the next."""


def job_shape(config: ReasoningConfig, *, on_gpu: bool = True, device_bytes: int = 0) -> JobShape:
    """What a step of the recipe asks of its ranks; `actor.num_shards` is settled.

    Args:
        device_bytes: memory of a device, for an engine that takes a share of it.
    """
    rollout, algorithm, lora = config.rollout, config.algorithm, config.actor.lora
    return JobShape(
        on_gpu=on_gpu,
        adapter=lora and Adapter(rank=lora.rank, targets=None if lora.targets == "all-linear" else lora.targets),
        trainer_options=config.actor.backend_options,
        lengths=Lengths(
            mean_tokens=max(1.0, rollout.max_new_tokens * MEAN_SHARE_OF_LIMIT),
            limit_tokens=rollout.max_new_tokens,
            prompt_tokens=rollout.max_prompt_tokens,
            group_size=config.algorithm.group_size,
        ),
        num_groups=rollout.num_prompts,
        dtype_bytes=DTYPE_BYTES[config.model.dtype],
        served_bytes=DTYPE_BYTES[config.served_dtype],
        num_shards=config.actor.resolved_shards,
        micro_batch_groups=config.actor.micro_batch_groups,
        max_tokens_per_micro_batch=config.actor.max_tokens_per_micro_batch,
        num_updates=algorithm.num_updates,
        has_critic=algorithm.has_critic,
        sft_warm_up_sequences=config.sft_warm_up.batch_size // config.actor.resolved_shards
        if config.sft_warm_up
        else 0,
        engine_options=rollout.engine_options,
        tensor_parallel=rollout.tensor_parallel_size,
        device_bytes=device_bytes,
    )


def shape_of(config: ReasoningConfig, num_words: int) -> ModelShape | None:
    """The shape of the recipe's model; None for an architecture whose parts we cannot count.

    Args:
        num_words: size of the tokenizer's vocabulary, for a model that is made from scratch.
    """
    architecture = config.model.architecture
    if architecture is not None:
        sizes = architecture.model_dump(exclude={"family", "max_positions"})
        width = architecture.hidden_size // architecture.num_heads
        return ModelShape(name=architecture.family, head_dim=width, vocab_size=num_words, qkv_bias=True, **sizes)
    assert config.model.path is not None, "a config has a path or an architecture"
    try:
        return named_shape(config.model.path)
    except ProfileError:
        return None


def named_shape(path: Path) -> ModelShape:
    """The shape of the model in a folder, or of the public model whose name a path ends with. Raises: ProfileError."""
    return resolve_model(path if path.is_dir() else path.name)


def reference_shape(config: ReasoningConfig, shape: ModelShape) -> ModelShape | None:
    """The shape of the reference's model: the teacher's, or the actor's own. None where the recipe has no reference, or
    where we cannot count the teacher's parts.

    Args:
        shape: the shape of the actor's model.

    Raises: UserError for a teacher that is neither a folder nor a public model.
    """
    if not config.has_reference_worker or config.reference.path is None:
        return shape if config.has_reference_worker else None
    try:
        return named_shape(config.reference.path)
    except ProfileError as error:
        if not config.reference.path.exists():
            raise UserError(f"reference.path: {error}") from error
        return None


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a rank of a worker group puts on a device."""

    group: str
    memory: RankMemory
    num_items: int
    """The most prompts that the rank works on at once."""
    offload: bool
    devices: tuple[int, ...] = ()
    """Each of them carries as much."""
    engine_process_bytes: int = 0
    """Host bytes of the processes that the rank's own process starts, beside the model."""

    @property
    def peak(self) -> int:
        return self.memory.peak(self.num_items)

    @property
    def process(self) -> int:
        """Bytes that the rank's processes take on CPU slots, without the store of weights; while a checkpoint is
        written, too."""
        work = self.memory.work(self.num_items)
        working = self.peak + round(HEAP_SHARE * (work + self.memory.optimizer))
        most = max(working + self.memory.host_copy, self.memory.state + self.memory.host_start)
        return PROCESS_BYTES + self.engine_process_bytes + max(1, len(self.devices)) * most


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


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPool:
    """Memory that ranks share, and what they need of it at most."""

    name: str
    has_bytes: int
    needed_bytes: int
    loads: tuple[Load, ...]
    needs: str = "a device needs"
    """Who needs it, in words."""

    @property
    def missing_bytes(self) -> int:
        """Negative where there is room."""
        return self.needed_bytes - self.has_bytes


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


def device_place(name: str, has_bytes: int, loads: Sequence[Load], mailbox: int = 0) -> MemoryPool:
    """What stays there, and the largest of those that take turns.

    Args:
        mailbox: as `mailbox_bytes`.
    """
    resident = sum(load.memory.state for load in loads if not load.offload)
    resident += mailbox if any(load.group == "actor" for load in loads) else 0
    needed = max((resident + load.peak - (0 if load.offload else load.memory.state) for load in loads), default=0)
    return MemoryPool(name=name, has_bytes=has_bytes, needed_bytes=needed, loads=tuple(loads))


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
    device_bytes, on_gpu = cluster.devices[0].memory_bytes, cluster.devices[0].kind == "cuda"
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

    def shortage_of(changed: ReasoningConfig) -> str | None:
        return pool_shortage(changed, shape, job_shape(changed, on_gpu=on_gpu, device_bytes=device_bytes))

    if shortage_of(config) or place_of(config).missing_bytes > 0:
        raise misfit(
            config,
            shape,
            place_of,
            shortage_of,
            num_ranks=actor.num_ranks,
            most_ranks=max(actor.num_ranks, most_ranks),
            num_devices=len(actor.devices),
            num_engine_devices=len(rollout.devices),
        )


def _ranks_in_replicas(config: ReasoningConfig, size: int, num_devices: int) -> int:
    """Ranks of an actor whose replicas have so many: as many replicas as devices and shards allow."""
    return math.gcd(config.actor.resolved_shards, max(1, num_devices // size)) * size


def stored_bytes(shape: ModelShape, config: ReasoningConfig) -> int:
    """Bytes of the store of weights between trainer and engines, which the processes share."""
    return NUM_STORED * DTYPE_BYTES[config.served_dtype] * shape.num_parameters


def misfit(
    config: ReasoningConfig,
    shape: ModelShape,
    place_of: Callable[[ReasoningConfig], MemoryPool],
    shortage_of: Callable[[ReasoningConfig], str | None],
    *,
    num_ranks: int,
    most_ranks: int,
    num_devices: int,
    num_engine_devices: int,
) -> UserError:
    """The refusal of a config that is short of memory, with the nearest settings that are not.

    Args:
        place_of: the place of a config that is fullest.
        shortage_of: as `pool_shortage`.
        num_ranks: ranks of the actor; `most_ranks` could be, on `num_devices`.
        num_engine_devices: devices of the rollout.
    """

    def fitting(changed: ReasoningConfig) -> int | None:
        if not (_can_be_cut(changed, shape, num_devices) and can_be_served(changed, shape, num_engine_devices)):
            return None
        if shortage_of(changed):
            return None
        place = place_of(changed)
        return None if place.missing_bytes > 0 else place.needed_bytes

    fits = fitting_changes(
        config, fitting, job_shape(config), num_ranks=num_ranks, most_ranks=most_ranks, num_devices=num_devices
    )
    if shortage := shortage_of(config):
        return UserError(shortage, hint=hint_of(fits))
    place = place_of(config)
    lines = {f"{load.group} {load.peak / 2**30:.2f} ({load.memory.describe(load.num_items)})" for load in place.loads}
    return UserError(
        f"model.path: {shape.name}, {shape.num_parameters / 1e9:.2f} billion parameters, does not fit: {place.needs} "
        f"about {place.needed_bytes / 2**30:.1f} GiB, and {place.name} has {place.has_bytes / 2**30:.1f}\n  - "
        + "\n  - ".join(sorted(lines)),
        hint=hint_of(fits),
    )


def _can_be_cut(config: ReasoningConfig, shape: ModelShape, num_devices: int) -> bool:
    """Whether the actor's backend can share the model out among ranks as it is told, on so many devices."""
    actor = config.actor
    if actor.trainer_spec.model_problem(actor.backend_options, shape):
        return False
    return num_devices % (actor.ranks_per_replica or 1) == 0


def check_gpu(config: ReasoningConfig, shape: ModelShape, gpu: Gpu, num_devices: int) -> None:
    """Whether each worker group alone fits GPUs that need not be there, spread over all. Raises: as `check_memory`."""

    def place_of(changed: ReasoningConfig) -> MemoryPool:
        job = job_shape(changed, device_bytes=gpu.memory_bytes)
        size = changed.actor.trainer_spec.num_ranks_of_replica(job)
        ranks = {"actor": _ranks_in_replicas(changed, size, num_devices)}
        memory_of = rank_memory(changed, shape, job, ranks)
        alone = [Load(group=group, memory=memory, num_items=1, offload=True) for group, memory in memory_of.items()]
        places = [device_place(gpu.name, gpu.memory_bytes, [load]) for load in alone]
        return max(places, key=lambda place: place.missing_bytes)

    def shortage_of(changed: ReasoningConfig) -> str | None:
        return pool_shortage(changed, shape, job_shape(changed, device_bytes=gpu.memory_bytes))

    if shortage_of(config) or place_of(config).missing_bytes > 0:
        num_ranks = math.gcd(config.actor.resolved_shards, num_devices)
        raise misfit(
            config,
            shape,
            place_of,
            shortage_of,
            num_ranks=num_ranks,
            most_ranks=num_devices,
            num_devices=num_devices,
            num_engine_devices=num_devices,
        )
