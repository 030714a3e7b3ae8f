"""The flows of the reasoning job, declared once for the run and for the planner, and the numbers of a step.

Nothing here imports torch.

prompts -> rollout -> [reference] -> reward -> actor -> weights -> rollout

Further policies, of agents by name, have an actor each: the reward stage writes a channel for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rlinf.config.reasoning import ReasoningConfig
from rlinf.jobs.trainer_memory import adapter_of
from rlinf_sched.derive import MEAN_SHARE_OF_LIMIT, JobShape, Lengths
from rlinf_workers import Flow
from rlinf_workers.trainers import DTYPE_BYTES

WORKERS = {
    "rollout": "rlinf_workers.roles:Rollout",
    "agents": "rlinf_workers.roles:AgentRollout",
    "router": "rlinf_workers.roles:SessionRouter",
    "reference": "rlinf_workers.roles:Reference",
    "reward": "rlinf_workers.roles:Reward",
    "actor": "rlinf_workers.roles:Actor",
}
"""Role -> import path of its class."""
SCORED, EXAMPLES = "scored", "examples"
"""Channels of the policy of model.path; those of a further policy end with its name."""
NONE: Mapping[str, Sequence[Any]] = MappingProxyType({})


def training_flow(config: ReasoningConfig, arguments: Mapping[str, Sequence[Any]] = NONE) -> Flow:
    """A step of training.

    Args:
        config: resolved, see `rlinf.config.devices.resolve_for_devices`.
        arguments: worker group -> arguments of its class; a plan needs none.
    """
    flow = Flow(config.algorithm.name.rpartition(":")[2], max_staleness=config.steps_ahead)
    _add_rollout(flow, config, *arguments.get("rollout", ()))
    for role in (*(("reference",) if config.has_reference_worker else ()), "reward"):
        flow.worker(role, WORKERS[role], *arguments.get(role, ()))
    for trainer in config.trainers:
        flow.worker(trainer, WORKERS["actor"], *arguments.get(trainer, ()))
    if config.has_prompts_by_rank:
        add_generation(flow, config, dispatch="key", granularities=(0,))
    else:
        add_generation(flow, config)
    samples = "samples"
    if config.has_reference_worker:
        flow.stage("reference", "logprobs", reads="samples", writes="referenced")
        samples = "referenced"
    scored = tuple(channel_of(SCORED, policy) for policy in config.trainers.values())
    flow.stage("reward", "score", reads=samples, writes=scored, needs_device=False)
    for trainer, channel in zip(config.trainers, scored, strict=True):
        flow.stage(
            trainer,
            "train",
            reads=channel,
            dispatch="key",
            ordered=config.actor.group_order == "index",
            trains=True,
            granularities=actor_granularities(config),
            num_parts=config.actor.resolved_shards,
        )
        flow.weights(trainer, to="rollout", offers=config.takes_weights)
    return flow


def channel_of(name: str, policy: str | None) -> str:
    """The channel of a policy; None: that of model.path."""
    return name if policy is None else f"{name}-{policy}"


def evaluation_flow(train: Flow, config: ReasoningConfig) -> Flow:
    """Answers to held-out problems, and their scores."""
    flow = Flow("evaluate").workers_of(train, "rollout", "reward")
    add_generation(flow, config)
    return flow.stage("reward", "score", reads="samples", writes=SCORED, needs_device=False)


def warmed_up_trainers(config: ReasoningConfig) -> dict[str, str]:
    """Worker group whose policy the SFT warm-up trains, one that has no path of its own -> the channel of its
    examples."""
    return {
        trainer: channel_of(EXAMPLES, policy)
        for trainer, policy in config.trainers.items()
        if config.policies[policy] is None
    }


def sft_warm_up_flow(train: Flow, config: ReasoningConfig) -> Flow:
    """Supervised training of the actors, each on the same examples."""
    flow = Flow("sft-warm-up")
    for trainer, channel in warmed_up_trainers(config).items():
        flow.workers_of(train, trainer)
        flow.stage(trainer, "imitate", reads=channel, dispatch="key", ordered=True, trains=True)
    return flow


def check_flow(train: Flow, config: ReasoningConfig, rollout: Any, trainer: str = "actor") -> Flow:
    """The engine samples and the trainer scores the same tokens (`rlinf check`).

    Args:
        rollout: settings of the rollout, which samples as in training.
        trainer: the worker group whose policy is checked.
    """
    name = channel_of("check", config.trainers[trainer])
    flow = Flow(name).workers_of(train, trainer)
    _add_rollout(flow, config, rollout)
    add_generation(flow, config)
    flow.stage(
        trainer,
        "compare",
        reads="samples",
        writes="compared",
        dispatch="key",
        ordered=True,
        trains=True,
        num_parts=config.actor.resolved_shards,
    )
    return flow.weights(trainer, to="rollout")


def probe_flow(train: Flow, config: ReasoningConfig) -> Flow:
    """The engine alone samples (`rollout.engine: auto`)."""
    flow = Flow("engine-probe").workers_of(train, "rollout")
    add_generation(flow, config)
    return flow


def add_generation(flow: Flow, config: ReasoningConfig, **how: Any) -> None:
    """The stage that samples; `how` are further arguments of `Flow.stage`."""
    span = config.rollout.devices_per_rank
    flow.stage("rollout", "generate", reads="prompts", writes="samples", devices_per_rank=span, **how)


def _add_rollout(flow: Flow, config: ReasoningConfig, *settings: Any) -> None:
    """The worker group that samples, and the routers that its ranks share."""
    flow.worker("rollout", WORKERS["rollout" if config.rollout.agent is None else "agents"], *settings)
    if config.routes_turns:
        flow.worker("router", WORKERS["router"], *settings, shared_by="rollout")


def num_sampled_prompts(config: ReasoningConfig) -> int:
    """Prompts that are sampled in a step."""
    return math.ceil(config.rollout.num_prompts * config.algorithm.oversampling)


def actor_granularities(config: ReasoningConfig) -> tuple[int, ...]:
    """Hand-overs that make sense for the actor, which computes once a micro-batch of every shard is there."""
    actor = config.actor
    if config.gathers_whole_step or actor.balance_shards:
        return (0,)
    size = actor.micro_batch_groups
    if actor.token_budget is not None:
        size = max(1, int(actor.token_budget / job_shape(config).lengths.packed_group_tokens))
    unit = size * actor.resolved_shards
    return (*range(unit, num_sampled_prompts(config), unit), 0)


def expected_lengths(config: ReasoningConfig) -> Lengths:
    """Tokens of completions or episodes, as far as they can be expected before any was sampled."""
    rollout, agent = config.rollout, config.rollout.agent
    lengths = Lengths(
        mean_tokens=max(1.0, rollout.max_completion_tokens * MEAN_SHARE_OF_LIMIT),
        limit_tokens=rollout.max_completion_tokens,
        prompt_tokens=rollout.max_prompt_tokens,
        group_size=config.algorithm.group_size,
    )
    if agent is None:
        return lengths
    sampled_tokens = agent.planned_turns * max(1.0, rollout.max_new_tokens * MEAN_SHARE_OF_LIMIT)
    return replace(
        lengths,
        num_turns=agent.planned_turns,
        sampled_share=min(1.0, sampled_tokens / lengths.mean_tokens),
        reads_cache=rollout.engine_spec.keeps_prefixes(rollout.engine_options),
        outside_s=(agent.planned_turns - 1) * agent.expected_tool_s,
    )


def job_shape(config: ReasoningConfig, *, on_gpu: bool = True, device_bytes: int = 0) -> JobShape:
    """What a step of the recipe asks of its ranks; `actor.num_shards` is settled.

    Args:
        device_bytes: memory of a device, for an engine that takes a share of it.
    """
    rollout, algorithm = config.rollout, config.algorithm
    return JobShape(
        on_gpu=on_gpu,
        adapter=adapter_of(config.actor.lora),
        syncs_adapter=config.syncs_adapters,
        trainer_options=config.actor.backend_options,
        lengths=expected_lengths(config),
        num_groups=rollout.num_prompts,
        dtype_bytes=DTYPE_BYTES[config.model.dtype],
        served_bytes=DTYPE_BYTES[config.served_dtype],
        serves_fp8=config.rollout.quantization == "fp8",
        num_shards=config.actor.resolved_shards,
        micro_batch_groups=config.actor.micro_batch_groups,
        max_tokens_per_micro_batch=config.actor.token_budget,
        num_updates=algorithm.num_updates,
        has_critic=algorithm.has_critic,
        sft_warm_up_sequences=config.sft_warm_up.batch_size // config.actor.resolved_shards
        if config.sft_warm_up
        else 0,
        engine_options=rollout.options_beside_others(on_gpu=on_gpu) or rollout.engine_options,
        tensor_parallel=rollout.tensor_parallel_size,
        device_bytes=device_bytes,
        engine_sequences=_engine_sequences(config),
    )


def _engine_sequences(config: ReasoningConfig) -> int:
    """Completions that an engine has at once, in training or for the held-out problems: its share of them under a plan
    that is known to give all devices to engines, otherwise all."""
    rollout, placed = config.rollout, config.plan
    is_spread = config.mode == "collocated" and not (placed.devices or placed.num_ranks)
    num_devices = config.cluster.num_devices if is_spread else "auto"
    num_engines = 1 if num_devices == "auto" else max(1, num_devices // rollout.tensor_parallel_size)
    steps = (
        (num_sampled_prompts(config), config.algorithm.group_size),
        (config.task.num_held_out, config.evaluation.num_samples),
    )
    return max(-(-num_prompts // num_engines) * num_rows for num_prompts, num_rows in steps)
