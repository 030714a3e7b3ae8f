"""Whether a reasoning recipe's model fits: what each rank of its workers will hold, before any of them starts.

`rlinf_sched.derive.memory` counts it, with a line for each training backend. `rlinf plan` plans with these numbers and
`rlinf train` refuses by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf_sched.cluster import Cluster
from rlinf_sched.derive import Gpu, Lengths
from rlinf_sched.derive.lengths import MEAN_SHARE_OF_LIMIT
from rlinf_sched.derive.memory import (
    Adapter,
    RankMemory,
    ReplicatedJob,
    forward_memory,
    generator_memory,
    trainer_memory,
)
from rlinf_sched.derive.shapes import ModelShape, resolve_model
from rlinf_sched.errors import ProfileError
from rlinf_sched.plan import Plan, StagePlan

PROCESS_BYTES = 384 << 20
"""Bytes that a worker process on a CPU slot takes beside its model: the interpreter with torch and transformers, as
measured in the reference's process (benchmarks/results/memory.json)."""
HEAP_SHARE = 0.4
"""Freed blocks that malloc keeps in such a process, as a share of the memory that comes and goes and of the optimizer's
moments, which are allocated in between; chosen so that no worker in the same measurements takes more."""
NUM_STORED = 2
"""Copies of the weights in the host's store between trainer and engines: the version that is served, and the next."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
HINT = (
    "use a smaller model, --model.dtype bfloat16, a smaller --actor.micro_batch_groups, --actor.num_shards or "
    "--rollout.max_new_tokens, --actor.backend fsdp2 over several devices, or devices with more memory"
)


def replicated_job(config: ReasoningConfig) -> ReplicatedJob:
    """What a step of the recipe asks of its ranks; `actor.num_shards` is settled."""
    rollout, algorithm, lora = config.rollout, config.algorithm, config.actor.lora
    return ReplicatedJob(
        backend=config.actor.backend,
        adapter=lora and Adapter(rank=lora.rank, targets=None if lora.targets == "all-linear" else lora.targets),
        backend_options=config.actor.backend_options,
        lengths=Lengths(
            mean_tokens=max(1.0, rollout.max_new_tokens * MEAN_SHARE_OF_LIMIT),
            limit_tokens=rollout.max_new_tokens,
            prompt_tokens=rollout.max_prompt_tokens,
            group_size=config.algorithm.group_size,
        ),
        num_groups=rollout.num_prompts,
        dtype_bytes=DTYPE_BYTES[config.model.dtype],
        num_shards=config.actor.settled_shards,
        micro_batch_groups=config.actor.micro_batch_groups,
        num_updates=algorithm.num_updates,
        has_critic=algorithm.has_critic,
        warm_start_sequences=config.warm_start.batch_size // config.actor.settled_shards if config.warm_start else 0,
    )


def shape_of(config: ReasoningConfig, num_words: int) -> ModelShape | None:
    """The shape of the recipe's model; None for an architecture whose parts we cannot count.

    Args:
        num_words: size of the tokenizer's vocabulary, for a model that is made from scratch.
    """
    made = config.model.architecture
    if made is not None:
        sizes = made.model_dump(exclude={"family", "max_positions"})
        width = made.hidden_size // made.num_heads
        return ModelShape(name=made.family, head_dim=width, vocab_size=num_words, qkv_bias=True, **sizes)
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
    """
    if not config.has_reference_worker or config.reference.path is None:
        return shape if config.has_reference_worker else None
    try:
        return named_shape(config.reference.path)
    except ProfileError:
        return None


def rank_memory(
    shape: ModelShape, job: ReplicatedJob, num_ranks: Mapping[str, int], reference: ModelShape | None
) -> dict[str, RankMemory]:
    """Worker group -> what one of its ranks holds.

    Args:
        reference: the shape of the reference's model; None: there is none.
    """
    found = {
        "rollout": generator_memory(shape, job),
        "actor": trainer_memory(shape, job, num_ranks.get("actor", 1)),
    }
    return found if reference is None else {**found, "reference": forward_memory(reference, job)}


def check_gpu(config: ReasoningConfig, shape: ModelShape, gpu: Gpu, num_devices: int) -> None:
    """Whether each worker group alone fits GPUs that need not be there, spread over all. Raises: as `check_memory`."""
    job = replicated_job(config)
    num_ranks = {"actor": math.gcd(job.num_shards, num_devices)}
    found = rank_memory(shape, job, num_ranks, reference_shape(config, shape))
    for group, memory in found.items():
        alone = Load(group=group, memory=memory, num_items=1, offload=True)
        _check_device(config, [alone], shape, gpu.name, gpu.memory_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a rank of a worker group puts on a device."""

    group: str
    memory: RankMemory
    num_items: int
    """The most prompts that the rank works on at once."""
    offload: bool
    devices: tuple[int, ...] = ()

    @property
    def peak(self) -> int:
        return self.memory.peak(self.num_items)

    @property
    def process(self) -> int:
        """Bytes that the rank's process takes on a CPU slot, without the store of weights."""
        work = self.peak - self.memory.state
        working = self.peak + round(HEAP_SHARE * (work + self.memory.optimizer))
        return PROCESS_BYTES + max(working, self.memory.state + self.memory.host_start)


def loads_of(config: ReasoningConfig, shape: ModelShape, plan: Plan) -> list[Load]:
    """The load of every rank of the plan that has a model."""
    job = replicated_job(config)
    ranks = {stage.stage: stage.num_ranks for stage in plan.stages}
    of_group = rank_memory(shape, job, ranks, reference_shape(config, shape))
    loads = []
    for stage in plan.stages:
        if (memory := of_group.get(stage.stage)) is None:
            continue
        num_items = _most_at_once(config, job, stage)
        for rank in range(stage.num_ranks):
            on = stage.devices_of(rank)[:1]  # where a rank has several, it computes on the first
            loads.append(Load(group=stage.stage, memory=memory, num_items=num_items, offload=stage.offload, devices=on))
    return loads


def _most_at_once(config: ReasoningConfig, job: ReplicatedJob, stage: StagePlan) -> int:
    """Prompts with `group_size` completions each, in training or, in other words, evaluation."""
    size, num_samples = job.lengths.group_size, config.evaluation.num_samples
    most = 0
    for num_prompts, num_rows in ((job.num_groups, size), (config.task.num_held_out, num_samples)):
        share = -(-num_prompts // stage.num_replicas)
        at_once = min(stage.granularity or share, share, max(1, job.max_sequences // num_rows))
        most = max(most, -(-at_once * num_rows // size))
    return most


def check_memory(config: ReasoningConfig, shape: ModelShape, plan: Plan, cluster: Cluster, memory_bytes: int) -> None:
    """Whether the plan's ranks fit their devices, or all of them the host where the devices are CPU slots.

    Raises: UserError with what each needs and what there is.
    """
    loads = loads_of(config, shape, plan)
    if cluster.devices[0].kind == "cpu":
        needed = sum(load.process for load in loads) + stored_bytes(shape, config)
        if needed > memory_bytes:  # offloading leaves everything where it is
            who = f"the {len(loads)} processes need"
            raise _misfit(config, shape, loads, who, needed, "this machine", memory_bytes)
        return
    for index, device in enumerate(cluster.devices):
        mine = [load for load in loads if index in load.devices]
        _check_device(config, mine, shape, f"{device.name} (device {index})", device.memory_bytes)


def stored_bytes(shape: ModelShape, config: ReasoningConfig) -> int:
    """Bytes of the store of weights between trainer and engines, which the processes share."""
    return NUM_STORED * DTYPE_BYTES[config.model.dtype] * shape.num_parameters


def _check_device(config: ReasoningConfig, loads: list[Load], shape: ModelShape, name: str, memory_bytes: int) -> None:
    """What stays there, and the largest of those that take turns."""
    resident = sum(load.memory.state for load in loads if not load.offload)
    needed = max((resident + load.peak - (0 if load.offload else load.memory.state) for load in loads), default=0)
    if needed > memory_bytes:
        raise _misfit(config, shape, loads, "a device needs", needed, name, memory_bytes)


def _misfit(
    config: ReasoningConfig, shape: ModelShape, loads: list[Load], who: str, needed: int, where: str, has: int
) -> UserError:
    lines = {f"{load.group} {load.peak / 2**30:.2f} ({load.memory.describe(load.num_items)})" for load in loads}
    return UserError(
        f"model.path: {shape.name}, {shape.num_parameters / 1e9:.2f} billion parameters, does not fit: {who} about "
        f"{needed / 2**30:.1f} GiB, and {where} has {has / 2**30:.1f}\n  - " + "\n  - ".join(sorted(lines)),
        hint=HINT,
    )
