"""Whether a reasoning recipe's model fits: what each rank of its workers will hold, before any of them starts.

Every rank holds the whole model, in the recipe's dtype (rlinf_sched.derive.replicated counts it). `rlinf plan` plans
with these numbers and `rlinf train` refuses by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlinf.config.reasoning import ArchitectureConfig, ReasoningConfig
from rlinf.errors import UserError
from rlinf_sched.cluster import Cluster
from rlinf_sched.derive import Gpu, Lengths
from rlinf_sched.derive.lengths import MEAN_SHARE_OF_LIMIT
from rlinf_sched.derive.replicated import (
    RankMemory,
    ReplicatedJob,
    forward_memory,
    generator_memory,
    trainer_memory,
)
from rlinf_sched.derive.shapes import ModelShape, resolve_model
from rlinf_sched.errors import ProfileError
from rlinf_sched.plan import Plan

PROCESS_BYTES = 420 << 20
"""Of a worker process on a CPU slot beside its model: the interpreter with torch and transformers, as the reference has
it (benchmarks/results/memory.json)."""
NUM_STORED = 2
"""Copies of the weights in the host's store between trainer and engines: the version that is served, and the next."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
HINT = (
    "every rank holds the whole model, nothing is sharded: use a smaller model, --model.dtype bfloat16, a smaller "
    "--actor.micro_batch_groups, --actor.num_shards or --rollout.max_new_tokens, or devices with more memory"
)


def replicated_job(config: ReasoningConfig) -> ReplicatedJob:
    """What a step of the recipe asks of its ranks; `actor.num_shards` is settled."""
    rollout, algorithm = config.rollout, config.algorithm.to_algorithm()
    return ReplicatedJob(
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
        num_optimizers=2 if config.warm_start else 1,
    )


def shape_of(config: ReasoningConfig, num_words: int) -> ModelShape | None:
    """Of the recipe's model; None for an architecture whose parts we cannot count.

    Args:
        num_words: of the tokenizer, for a model that is made from scratch.
    """
    if config.model.architecture is not None:
        return _made(config.model.architecture, num_words)
    assert config.model.path is not None, "a config has a path or an architecture"
    try:
        return resolve_model(config.model.path if config.model.path.is_dir() else config.model.path.name)
    except ProfileError:
        return None


def rank_memory(
    shape: ModelShape, job: ReplicatedJob, num_ranks: Mapping[str, int], *, has_reference: bool
) -> dict[str, RankMemory]:
    """Worker group -> what one of its ranks holds."""
    found = {
        "rollout": generator_memory(shape, job),
        "actor": trainer_memory(shape, job, num_ranks.get("actor", 1)),
    }
    return {**found, "reference": forward_memory(shape, job)} if has_reference else found


def check_gpu(config: ReasoningConfig, shape: ModelShape, gpu: Gpu, num_devices: int) -> None:
    """Whether any plan fits GPUs that need not be there: each worker group alone, spread over all of them.

    Raises: as `check_memory`.
    """
    job = replicated_job(config)
    num_ranks = {"actor": math.gcd(job.num_shards, num_devices)}
    found = rank_memory(shape, job, num_ranks, has_reference=bool(config.algorithm.kl_coef))
    for group, memory in found.items():
        alone = _Load(group=group, memory=memory, num_items=1, offload=True)
        _check_device([alone], shape, gpu.name, gpu.memory_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Load:
    """What a rank of a worker group puts on a device."""

    group: str
    memory: RankMemory
    num_items: int
    offload: bool

    @property
    def peak(self) -> int:
        return self.memory.peak(self.num_items)


def check_memory(config: ReasoningConfig, shape: ModelShape, plan: Plan, cluster: Cluster, memory_bytes: int) -> None:
    """Whether the plan's ranks fit their devices, or all of them the host where the devices are CPU slots.

    Raises: UserError with what each needs and what there is.
    """
    job = replicated_job(config)
    ranks = {stage.stage: stage.num_ranks for stage in plan.stages}
    of_group = rank_memory(shape, job, ranks, has_reference=bool(config.algorithm.kl_coef))
    loads: dict[int, list[_Load]] = {device.index: [] for device in cluster.devices}
    for stage in plan.stages:
        if (memory := of_group.get(stage.stage)) is None:
            continue
        share = -(-job.num_groups // stage.num_replicas)
        at_once = min(stage.granularity or share, share, max(1, job.max_sequences // job.lengths.group_size))
        load = _Load(group=stage.stage, memory=memory, num_items=at_once, offload=stage.offload)
        for index in stage.devices[: stage.num_ranks]:
            loads[index] += [load] * max(1, stage.num_ranks // len(stage.devices))
    if cluster.devices[0].kind == "cpu":
        _check_host([load for device in loads.values() for load in device], shape, memory_bytes)
        return
    for index, device in enumerate(cluster.devices):
        _check_device(loads[index], shape, f"{device.name} (device {index})", device.memory_bytes)


def _check_host(loads: list[_Load], shape: ModelShape, memory_bytes: int) -> None:
    """CPU slots share one memory, and offloading leaves everything where it is. The processes share the store."""
    needed = sum(PROCESS_BYTES + load.peak for load in loads)
    needed += NUM_STORED * max((load.memory.weights for load in loads if load.group == "rollout"), default=0)
    if needed > memory_bytes:
        raise _misfit(shape, loads, f"the {len(loads)} processes need", needed, "this machine", memory_bytes)


def _check_device(loads: list[_Load], shape: ModelShape, name: str, memory_bytes: int) -> None:
    """What stays there, and the largest of those that take turns."""
    resident = sum(load.memory.state for load in loads if not load.offload)
    needed = max((resident + load.peak - (0 if load.offload else load.memory.state) for load in loads), default=0)
    if needed > memory_bytes:
        raise _misfit(shape, loads, "a device needs", needed, name, memory_bytes)


def _misfit(shape: ModelShape, loads: list[_Load], who: str, needed: int, where: str, has: int) -> UserError:
    lines = {f"{load.group} {load.peak / 2**30:.2f} ({load.memory.describe(load.num_items)})" for load in loads}
    return UserError(
        f"model.path: {shape.name}, {shape.num_parameters / 1e9:.2f} billion parameters, does not fit: {who} about "
        f"{needed / 2**30:.1f} GiB, and {where} has {has / 2**30:.1f}\n  - " + "\n  - ".join(sorted(lines)),
        hint=HINT,
    )


def _made(architecture: ArchitectureConfig, num_words: int) -> ModelShape:
    return ModelShape(
        name=architecture.family,
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.hidden_size // architecture.num_heads,
        vocab_size=num_words,
        tied_embeddings=True,
        qkv_bias=True,
    )
