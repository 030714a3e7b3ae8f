"""From a recipe to a planning problem, with profiles derived from public shapes; nothing is loaded or run.

The problem is of the workers that `rlinf train` starts: a whole copy of the model on every rank, Hugging Face's decoder
to generate. Memory that they have not got is refused with numbers. `embodied` does the same for robots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rlinf.config.devices import resolve_for_devices
from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.jobs.reasoning.flow import expected_lengths, job_shape, training_flow
from rlinf.jobs.reasoning.memory import (
    check_fits,
    cut_refusal,
    kept_weights,
    loads_alone,
    loads_of,
    nodes_of,
    policy_shapes,
    rank_memory,
    recompute_notes,
    reference_shape,
    with_budget_on,
)
from rlinf.jobs.trainer_memory import named_shape
from rlinf.planning.memory import Load, MemoryPool, device_place
from rlinf.planning.problems import planned_gpus
from rlinf_sched import Cluster, FlowGraph, Plan, Problem, Profiles, SchedError, Stage, StageProfile
from rlinf_sched.derive import Gpu, JobShape, ModelShape, find_gpu, rule_profile

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
            hint="give --model.path FOLDER or a public name such as Qwen/Qwen2.5-7B, and --model.architecture null",
        )
    resolved = resolve_for_devices(config, num_devices)
    try:
        model = named_shape(config.model.path)
    except SchedError as error:
        raise UserError(f"model.path: {error}", hint="or give a name on the Hub: ORG/NAME") from error
    try:
        if refusal := cut_refusal(config, model, num_devices):
            raise refusal
        sheet = find_gpu(gpu)
        cluster = planned_gpus(config.cluster, gpu, num_devices)
        nodes = range(cluster.num_nodes)
        resolved = with_budget_on(resolved, model, cluster)
        job = job_shape(resolved, device_bytes=sheet.memory_bytes)
        _check_gpu(resolved, model, sheet, num_devices, nodes)
        token_bytes = TOKEN_BYTES
        if config.actor.router_replay:  # one byte for each choice; two beyond 256 experts
            token_bytes += model.num_layers * model.num_active_experts * (1 if model.num_experts <= 256 else 2)
        group_bytes = token_bytes * job.lengths.group_tokens
        flow = with_versions(planned_flow(resolved, group_bytes=group_bytes), resolved, model, nodes)
        return Problem(
            flow=flow,
            profiles=recipe_profiles(flow, config, model, sheet, job),
            cluster=cluster,
            num_items=job.num_groups,
        )
    except SchedError as error:
        raise UserError(str(error)) from error


def budget_notes(config: ReasoningConfig, cluster: Cluster) -> list[str]:
    """What a plan takes for `actor.max_tokens_per_micro_batch: auto`, and whether activations are recomputed."""
    resolved = resolve_for_devices(config, len(cluster.devices))
    if resolved.model.path is None:
        return []
    settled = with_budget_on(resolved, named_shape(resolved.model.path), cluster)
    notes = recompute_notes(resolved, settled)
    if resolved.actor.max_tokens_per_micro_batch == "auto" and settled.actor.token_budget is not None:
        notes.insert(0, f"actor.max_tokens_per_micro_batch=auto is {settled.actor.token_budget:,} tokens")
    return notes


def turn_notes(config: ReasoningConfig) -> list[str]:
    """What a plan takes for granted of the turns of episodes."""
    agent = config.rollout.agent
    if agent is None:
        return []
    lengths = expected_lengths(config)
    chosen = f"half of max_turns={agent.max_turns}" if agent.expected_turns is None else "rollout.agent.expected_turns"
    how = "read from the cache" if lengths.reads_cache else "computed again at each turn"
    return [
        f"episodes have {lengths.num_turns:g} turns ({chosen}), and {lengths.outside_s:g} s outside the engine "
        f"(rollout.agent.expected_tool_s={agent.expected_tool_s:g} after each turn but the last); of "
        f"{lengths.mean_tokens:.0f} tokens {lengths.sampled_share:.0%} are sampled; conversations are {how}",
        _router_note(config),
    ]


def _router_note(config: ReasoningConfig) -> str:
    """Who runs the episodes, and what a plan does not count of it."""
    if config.routes_turns:
        return (
            "up to eight ranks of the rollout share a router, which gives turns to the least loaded of their engines; "
            "the plan counts each engine with episodes of its own, so steps with unequal ones may be shorter"
        )
    keys = {
        "rollout.agent.router=false": config.rollout.agent is not None and not config.rollout.agent.router,
        "run.record=true": config.run.record,
        "rollout.sampler=as_finished": config.max_lateness > 0,
        f"rollout.on_new_weights={config.rollout.on_new_weights}": config.takes_weights,
    }
    why = next(key for key, is_set in keys.items() if is_set)
    return f"{why}: no router; each rank of the rollout runs its own episodes, and they end with it"


def _check_gpu(config: ReasoningConfig, shape: ModelShape, gpu: Gpu, num_devices: int, nodes: Sequence[int]) -> None:
    """Whether each worker group alone fits GPUs that need not be there, spread over all. Raises: as
    `check_fits`."""
    job_of = partial(job_shape, device_bytes=gpu.memory_bytes)

    def place_of(changed: ReasoningConfig) -> MemoryPool:
        alone = loads_alone(changed, shape, gpu.memory_bytes, num_devices, nodes)
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
        nodes=nodes,
    )


def recipe_profiles(flow: FlowGraph, config: ReasoningConfig, model: ModelShape, gpu: Gpu, job: JobShape) -> Profiles:
    """Profiles of the workers that `rlinf train` starts. Raises: ProfileError."""
    trainer, engine = config.actor.trainer_spec, config.rollout.engine_spec
    reference, trained = reference_shape(config, model) or model, policy_shapes(config, model)

    def profile(stage: Stage) -> StageProfile:
        if not stage.needs_device:
            return rule_profile(job.lengths.group_size, job.num_groups)
        if stage.trains:
            own = trained[stage.worker] or model
            profile = trainer.train_profile(own, gpu, job)
            # It sends what it has quantized, or its adapter.
            sends_less = job.serves_fp8 or job.syncs_adapter
            return replace(profile, weights_bytes=job.synced_weights_bytes(own)) if sends_less else profile
        if stage.role == "rollout":
            derived = with_others(engine.profile(model, gpu, job), config, model, job)
            derived = replace(derived, weights_bytes=job.synced_weights_bytes(model))
            # Where late groups fill the places of those that have ended, a step costs what its mean group costs.
            return replace(derived, batching="sum") if config.max_lateness else derived
        return trainer.forward_profile(reference, gpu, job)

    return Profiles(stages={stage.name: profile(stage) for stage in flow.stages})


def with_others(profile: StageProfile, config: ReasoningConfig, model: ModelShape, job: JobShape) -> StageProfile:
    """The rollout's profile with the memory of the engines of partners and further policies. Their time is not
    counted."""
    if not config.rollout.partner_paths and not config.rollout.further_policies:
        return profile
    alone = config.rollout.engine_spec.memory(model, job)
    whole = rank_memory(config, model, job, {})["rollout"]
    state, work = whole.state - alone.state, whole.work() - alone.work()
    instances = tuple(
        replace(one, state_bytes=one.state_bytes + state, item_work_bytes=one.item_work_bytes + work)
        for one in profile.instances
    )
    return replace(profile, instances=instances)


def reasoning_loads(config: ReasoningConfig, plan: Plan, cluster: Cluster) -> list[Load]:
    """What the ranks of a plan for `reasoning_problem` hold."""
    resolved = resolve_for_devices(config, int(config.cluster.num_devices))
    assert resolved.model.path is not None, "there is a problem of it"
    device_bytes, shape = cluster.devices[0].memory_bytes, named_shape(resolved.model.path)
    resolved = with_budget_on(resolved, shape, cluster)
    return loads_of(resolved, shape, plan, device_bytes=device_bytes, nodes=nodes_of(plan, cluster))


def with_versions(flow: FlowGraph, config: ReasoningConfig, model: ModelShape, nodes: Sequence[int]) -> FlowGraph:
    """The flow with the size of the versions that the trainer's GPUs keep.

    Args:
        nodes: nodes of trainer and engines.
    """
    versions = {
        group: kept_weights(config, own or model, 1, nodes=nodes) for group, own in policy_shapes(config, model).items()
    }
    of_version = {group: one.gpu_bytes // one.num_versions for group, one in versions.items()}
    edges = tuple(replace(edge, kept_bytes=of_version[edge.source]) for edge in flow.weight_edges)
    return replace(flow, weight_edges=edges)


def planned_flow(config: ReasoningConfig, *, group_bytes: float) -> FlowGraph:
    """The training flow with the sizes of its items.

    Args:
        config: resolved, see `rlinf.config.devices.resolve_for_devices`.
        group_bytes: size of one prompt's answers on a channel.
    """
    graph = training_flow(config).graph()
    inner = [channel for channel in graph.channels if channel not in graph.feeds]
    return replace(graph, name="grpo", item_bytes=dict.fromkeys(inner, round(group_bytes)))
