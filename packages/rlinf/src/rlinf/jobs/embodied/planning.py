"""From an embodied recipe to a planning problem: a published policy and a simulator of which public figures are known,
or whose time is given.

Simulators are work for the host's cores, a process a core, as `rlinf train` has them beside GPUs; but for those that
simulate on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from rlinf.config.embodied import EmbodiedConfig
from rlinf.errors import UserError
from rlinf.jobs.embodied.buffer_memory import demonstrated_in, size_of
from rlinf.jobs.embodied.flow import training_flow
from rlinf.planning.memory import weight_sync_of
from rlinf.planning.problems import planned_gpus
from rlinf_algos import Algorithm, AlgosError, DaggerAlgorithm, OffPolicyAlgorithm
from rlinf_envs import EnvError
from rlinf_sched import Cluster, InstanceProfile, Problem, Profiles, SchedError, Stage, StageProfile
from rlinf_sched.derive import (
    CORES_PER_DEVICE,
    GPUS_PER_NODE,
    SIMULATORS,
    CpuSimulator,
    Embodied,
    GpuSimulator,
    derive_profiles,
    on_busy_cores,
    profile_of_groups,
)
from rlinf_workers.plugins import POLICIES
from rlinf_workers.policies import ActingCost

NUMBER_BYTES = 12
"""On a channel, for each number of an action: itself, its log-probability and what comes with it."""


def embodied_problem(config: EmbodiedConfig, num_devices: int, *, gpu: str, env_step_s: float | None = None) -> Problem:
    """The problem that an embodied recipe poses on so many GPUs, which need not be there.

    Args:
        gpu: a product that the planner has a datasheet of.
        env_step_s: seconds of one step of one environment on a core, cameras included; None: public figures.

    Raises: UserError for a policy or simulator of which nothing is known, or a model that fits no such GPU.
    """
    if isinstance(config.algorithm, OffPolicyAlgorithm):
        raise UserError(
            f"algorithm.name={config.algorithm.name}: what its policies and critics take is not known before they are "
            "profiled",
            hint="rlinf profile measures them; its problem file is planned like any other. What the buffers "
            "take of host memory is counted before a run starts, and is among its notes",
        )
    try:
        cost, simulator = _acting_cost(config), _simulator(config, env_step_s)
        flow = training_flow(config, on_host=isinstance(simulator, CpuSimulator)).graph()
        job = _job(config, cost, simulator)
        profiles = derive_profiles(flow, model=cost.shape, gpu=gpu, job=job)
        in_groups = {
            stage.name: _of_workers(config, stage, profiles.stages[stage.name], num_devices) for stage in flow.stages
        }
        if config.begins_ahead:
            in_groups["policy"] = _with_earlier_weights(in_groups["policy"], cost.shape.weights_bytes)
        cluster = planned_gpus(config.cluster, gpu, num_devices)
        kept_bytes = _version_bytes(config, cost, cluster)
        edges = tuple(replace(edge, kept_bytes=kept_bytes) for edge in flow.weight_edges)
        return Problem(
            flow=replace(flow, item_bytes=_item_bytes(config, job), weight_edges=edges),
            profiles=Profiles(stages=in_groups),
            cluster=cluster,
            num_items=config.env.num_groups,
        )
    except (SchedError, AlgosError, EnvError) as error:
        raise UserError(str(error)) from error


def _job(config: EmbodiedConfig, cost: ActingCost, simulator: CpuSimulator | GpuSimulator) -> Embodied:
    env, algorithm, actor = config.env, config.algorithm, config.actor
    num_rounds = max(1, env.num_steps // cost.chunk_size)
    if env.episodes_per_step is not None:  # num_steps is the longest episode
        num_rounds = -(-env.num_steps // cost.chunk_size) * -(-env.episodes_per_step // env.num_envs)
    job = Embodied(
        simulator=simulator,
        num_envs=env.num_envs,
        num_rounds=num_rounds,
        chunk_steps=cost.chunk_size,
        parallel_decoding=cost.parallel_decoding,
        denoising_steps=cost.denoising_steps,
        trained_steps=cost.trained_steps,
        predicted_actions=cost.predicted_actions,
        trains_expert_alone=cost.trains_expert_alone,
        num_cameras=cost.num_cameras,
        text_tokens=cost.text_tokens,
    )
    if isinstance(algorithm, DaggerAlgorithm):
        minibatch = algorithm.batch_size
        job = replace(job, num_minibatches=algorithm.num_updates, num_trained=algorithm.num_updates * minibatch)
    else:
        assert isinstance(algorithm, Algorithm), "others are refused before"
        minibatch = env.num_envs * num_rounds // algorithm.num_minibatches
        job = replace(job, num_minibatches=algorithm.num_minibatches, num_epochs=algorithm.num_epochs)
    return replace(job, micro_batch=actor.micro_batch_size or max(1, minibatch // actor.num_shards))


def _acting_cost(config: EmbodiedConfig) -> ActingCost:
    name, spec = config.policy.name, config.policy.spec
    if spec.published_model and not config.policy.options.get("folder"):
        raise UserError(
            "policy.options.folder is not set: times are derived from the shape of a published model",
            hint=f"give --policy.options.folder FOLDER, or {spec.published_model}",
        )
    cost = spec.acting_cost(config.policy.arguments, config.env.options)
    if cost is None:
        published = ", ".join(spec.name for spec in POLICIES.specs() if spec.published_model)
        raise UserError(
            f"policy.name={name}: what it takes is not known before it is profiled; public figures are known of "
            f"{published}",
            hint="rlinf profile measures any policy where it runs; its problem file is planned like any other",
        )
    return cost


def _simulator(config: EmbodiedConfig, step_s: float | None) -> CpuSimulator | GpuSimulator:
    env = config.env
    if step_s is None:
        if published := env.spec.published_simulator(env.id, env.options):
            return SIMULATORS[published]
        step_s = env.spec.seconds_per_step
    if step_s is not None:
        return CpuSimulator(
            name=f"{env.id}, {step_s:g} s a step as given",
            step_s=step_s,
            cores_per_device=CORES_PER_DEVICE,
            env_device_bytes=0,
        )
    raise UserError(
        f"env.kind={env.kind}: there are no public figures of this simulator on a host's cores",
        hint="give the seconds of one step of one environment on a core, cameras included: --env-step-s 0.02",
    )


def embodied_notes(config: EmbodiedConfig, *, env_step_s: float | None = None) -> tuple[str, ...]:
    """What a plan takes for granted of an environment of which no figures are public, and what buffers take."""
    return (*_simulator_notes(config, env_step_s), *_buffer_notes(config, env_step_s))


def _buffer_notes(config: EmbodiedConfig, env_step_s: float | None) -> tuple[str, ...]:
    algorithm = config.algorithm
    if not isinstance(algorithm, DaggerAlgorithm):
        return ()
    job = _job(config, _acting_cost(config), _simulator(config, env_step_s))
    row_bytes = _picture_bytes(config, job.num_cameras) + 4 * job.action_dim * job.chunk_steps
    size = f"{algorithm.buffer_size:,} answers, {size_of(algorithm.buffer_size * row_bytes)}"
    return (
        f"dagger: the actor's host memory keeps up to {size}{demonstrated_in(config, row_bytes).text}. What the expert "
        "takes to answer is not counted",
    )


def _simulator_notes(config: EmbodiedConfig, env_step_s: float | None) -> tuple[str, ...]:
    env = config.env
    published = "" if env_step_s is not None else env.spec.published_simulator(env.id, env.options)
    simulator = SIMULATORS.get(published)
    if not isinstance(simulator, GpuSimulator) or simulator.task in ("", env.id):
        return ()
    return (
        f"env.id={env.id} is planned with what {simulator.name} costs, the one GPU simulation of which figures "
        f"are public: {simulator.settings}. rlinf profile measures this one",
    )


def _item_bytes(config: EmbodiedConfig, job: Embodied) -> dict[str, int]:
    """Of a group of environments on each channel."""
    group_size = config.env.num_envs // config.env.num_groups
    pictures = _picture_bytes(config, job.num_cameras)
    numbers = job.action_dim * job.chunk_steps
    return {
        "observations": group_size * pictures,
        "actions": group_size * 4 * numbers,
        "trajectories": group_size * job.num_rounds * (pictures + NUMBER_BYTES * numbers),
    }


def _picture_bytes(config: EmbodiedConfig, num_cameras: int) -> int:
    """Of an observation."""
    return 3 * config.env.spec.picture_pixels(config.env.options) * num_cameras


def _version_bytes(config: EmbodiedConfig, cost: ActingCost, cluster: Cluster) -> int:
    """What the actor's GPUs keep of each published version until the policy has received it."""
    spec = weight_sync_of(config.cluster, sorted({device.node for device in cluster.devices}), on_gpu=True)
    size = cost.shape.weights_bytes
    return spec.gpu_bytes(trained_bytes=size, served_bytes=size, options=config.cluster.weight_sync_options)


def _of_workers(config: EmbodiedConfig, stage: Stage, profile: StageProfile, num_devices: int) -> StageProfile:
    """The profile as the workers of `rlinf train` have it: of groups, on no more cores than there are, and with a whole
    copy of the training state on every rank unless it is sharded."""
    num_groups = config.env.num_groups
    of_groups = profile_of_groups(profile, config.env.num_envs // num_groups, num_groups)
    if not stage.needs_device:
        on_drivers_node = min(num_devices, GPUS_PER_NODE)  # where all processes without a device are
        return on_busy_cores(of_groups, CORES_PER_DEVICE * on_drivers_node)
    if stage.trains and not config.actor.trainer_spec.shards_state:
        return replace(of_groups, instances=tuple(map(_whole, of_groups.instances)))
    return of_groups


def _with_earlier_weights(profile: StageProfile, weights_bytes: int) -> StageProfile:
    """The profile of a policy that finishes a step with its weights while it acts in the next one with newer ones."""
    instances = (replace(one, state_bytes=one.state_bytes + weights_bytes) for one in profile.instances)
    return replace(profile, instances=tuple(instances))


def _whole(instance: InstanceProfile) -> InstanceProfile:
    state = instance.state_bytes + instance.sharded_state_bytes
    return replace(instance, state_bytes=state, sharded_state_bytes=0)
