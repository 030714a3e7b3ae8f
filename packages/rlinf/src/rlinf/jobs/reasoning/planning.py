"""From a recipe to a planning problem, with profiles derived from public shapes; nothing is loaded or run.

The problem is of the workers that `rlinf train` starts: a whole copy of the model on every rank, Hugging Face's decoder
to generate. Memory that they have not got is refused with numbers. `embodied` does the same for robots.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlinf.config.devices import resolve_for_devices
from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.jobs.reasoning.flow import training_flow
from rlinf.jobs.reasoning.memory import check_gpu, loads_of
from rlinf.jobs.reasoning.shapes import job_shape, named_shape, reference_shape
from rlinf.jobs.reasoning.smaller import cut_refusal
from rlinf.planning.memory import Load
from rlinf_sched import Cluster, FlowGraph, Plan, Problem, Profiles, SchedError, Stage, StageProfile
from rlinf_sched.derive import Gpu, JobShape, ModelShape, find_gpu, gpu_cluster, rule_profile

TOKEN_BYTES = 12
"""On a channel: an int32 id, a float32 log-probability and a mask or advantage."""


def reasoning_problem(config: ReasoningConfig, num_devices: int, *, gpu: str, env_step_s: float | None) -> Problem:
    """As `JobSpec.problem`; the config's model is a folder, or the name of a public model.

    Raises: UserError for a recipe that names no model, or of whose parts nothing is known.
    """
    if env_step_s is not None:
        raise UserError("--env-step-s: this recipe has no environments", hint="leave it out")
    if config.model.path is None:
        raise UserError(
            "model.path is not set: times are derived from the shape of a model",
            hint="give --model.path FOLDER or a public name such as Qwen2.5-7B, and --model.architecture null",
        )
    resolved = resolve_for_devices(config, num_devices)
    try:
        model = named_shape(config.model.path)
        if refusal := cut_refusal(config, model, num_devices):
            raise refusal
        sheet = find_gpu(gpu)
        job = job_shape(resolved, device_bytes=sheet.memory_bytes)
        check_gpu(resolved, model, sheet, num_devices)
        group_bytes = TOKEN_BYTES * job.lengths.group_tokens
        flow = planned_flow(resolved, group_bytes=group_bytes)
        return Problem(
            flow=flow,
            profiles=recipe_profiles(flow, config, model, sheet, job),
            cluster=gpu_cluster(gpu, num_devices),
            num_items=job.num_groups,
        )
    except SchedError as error:
        raise UserError(str(error)) from error


def recipe_profiles(flow: FlowGraph, config: ReasoningConfig, model: ModelShape, gpu: Gpu, job: JobShape) -> Profiles:
    """Profiles of the workers that `rlinf train` starts. Raises: ProfileError."""
    trainer, engine = config.actor.trainer_spec, config.rollout.engine_spec
    reference = reference_shape(config, model) or model

    def profile(stage: Stage) -> StageProfile:
        if not stage.needs_device:
            return rule_profile(job.lengths.group_size, job.num_groups)
        if stage.trains:
            return trainer.train_profile(model, gpu, job)
        if stage.role == "rollout":
            return engine.profile(model, gpu, job)
        return trainer.forward_profile(reference, gpu, job)

    return Profiles(stages={stage.name: profile(stage) for stage in flow.stages})


def reasoning_loads(config: ReasoningConfig, plan: Plan, cluster: Cluster) -> list[Load]:
    """What the ranks of a plan for `reasoning_problem` hold."""
    resolved = resolve_for_devices(config, int(config.cluster.num_devices))
    assert resolved.model.path is not None, "there is a problem of it"
    device_bytes = cluster.devices[0].memory_bytes
    return loads_of(resolved, named_shape(resolved.model.path), plan, device_bytes=device_bytes)


def planned_flow(config: ReasoningConfig, *, group_bytes: float) -> FlowGraph:
    """The training flow with the sizes of its items.

    Args:
        config: resolved, see `rlinf.config.devices.resolve_for_devices`.
        group_bytes: size of one prompt's answers on a channel.
    """
    graph = training_flow(config, granularities=actor_granularities(config)).graph()
    inner = [channel for channel in graph.channels if channel not in graph.feeds]
    return replace(graph, name="grpo", item_bytes=dict.fromkeys(inner, round(group_bytes)))


def num_sampled_prompts(config: ReasoningConfig) -> int:
    """Prompts that are sampled in a step."""
    return math.ceil(config.rollout.num_prompts * config.algorithm.oversampling)


def actor_granularities(config: ReasoningConfig) -> tuple[int, ...]:
    """Hand-overs that make sense for the actor, which computes once a micro-batch of every shard is there."""
    actor = config.actor
    if config.gathers_whole_step or actor.balance_shards:
        return (0,)
    size = actor.micro_batch_groups
    if actor.max_tokens_per_micro_batch is not None:
        size = max(1, int(actor.max_tokens_per_micro_batch / job_shape(config).lengths.packed_group_tokens))
    unit = size * actor.resolved_shards
    return (*range(unit, num_sampled_prompts(config), unit), 0)
