"""From an embodied recipe to a planning problem: a published policy and a simulator of which public figures are known,
or whose time is given.

Simulators are work for the host's cores, a process a core, as `rlinf train` has them beside GPUs; but for those that
simulate on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.config.embodied import EmbodiedConfig, EnvConfig
from rlinf.errors import UserError
from rlinf.jobs.embodied.flow import training_flow
from rlinf_sched.derive import (
    LIBERO,
    MANISKILL_PUT_ON_PLATE,
    CpuSimulator,
    Embodied,
    GpuSimulator,
    derive_profiles,
    find_model,
    gpu_cluster,
)
from rlinf_sched.derive.datasheets import GPUS_PER_NODE
from rlinf_sched.derive.groups import profile_of_groups
from rlinf_sched.derive.shapes import ModelShape
from rlinf_sched.derive.simulators import on_busy_cores
from rlinf_sched.errors import SchedError
from rlinf_sched.flow_graph import Stage
from rlinf_sched.problem import Problem
from rlinf_sched.profile import InstanceProfile, Profiles, StageProfile

NUMBER_BYTES = 12
"""On a channel, for each number of an action: itself, its log-probability and what comes with it."""
OWN_PIXELS = {"metaworld": 64 * 64, "libero": 128 * 128}
"""`env.kind` -> pixels of a picture where `env.options.image_size` is not set."""
OWN_CAMERA_PIXELS = {"3rd_view_camera": 640 * 480}
"""The same of ManiSkill's cameras that are not 128 x 128: that of its bridge scenes."""
ASSUMED_PIXELS = 128 * 128
"""The same of any other; most of ManiSkill's cameras are so."""
PUBLIC_TASK = "PutCarrotOnPlateInScene-v1"
"""Of ManiSkill, the nearest to the tasks that `MANISKILL_PUT_ON_PLATE` has its settings of."""
CORES_PER_DEVICE = LIBERO.cores_per_device
"""Cores of the host for each GPU of a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPolicy:
    """What a policy's published checkpoint does with an observation; a recipe's `policy.options` come before it."""

    model: str
    """Its name in `rlinf_sched.derive.MODELS`."""
    chunk_size: int
    text_tokens: int
    parallel_decoding: bool = False
    predicted_actions: int = 0
    """Actions that its expert denoises."""
    denoising_steps: int = 0


POLICIES = {
    "openvla": PublishedPolicy(model="OpenVLA-7B", chunk_size=1, text_tokens=30),
    "openvla_oft": PublishedPolicy(model="OpenVLA-OFT", chunk_size=8, text_tokens=40, parallel_decoding=True),
    # 48 tokens of prompt and chunks of 50 actions (openpi's configuration); pi0.5 reads the state as text (200 tokens)
    "pi0": PublishedPolicy(model="pi0", chunk_size=5, text_tokens=48, predicted_actions=50, denoising_steps=4),
    "pi05": PublishedPolicy(model="pi0.5", chunk_size=5, text_tokens=200, predicted_actions=50, denoising_steps=4),
}
"""`policy.name` -> what is known of it."""


def embodied_problem(config: EmbodiedConfig, num_devices: int, *, gpu: str, env_step_s: float | None = None) -> Problem:
    """The problem that an embodied recipe poses on so many GPUs, which need not be there.

    Args:
        gpu: a product that the planner has a datasheet of.
        env_step_s: seconds of one step of one environment on a core, cameras included; None: public figures.

    Raises: UserError for a policy or simulator of which nothing is known, or a model that fits no such GPU.
    """
    known, simulator = _policy(config), _simulator(config, env_step_s)
    job = _job(config, known, simulator)
    flow = training_flow(config, on_host=isinstance(simulator, CpuSimulator)).graph()
    try:
        profiles = derive_profiles(flow, model=_shape(config, known), gpu=gpu, job=job)
        in_groups = {
            stage.name: _of_workers(config, stage, profiles.stages[stage.name], num_devices) for stage in flow.stages
        }
        return Problem(
            flow=replace(flow, item_bytes=_item_bytes(config, job)),
            profiles=Profiles(stages=in_groups),
            cluster=gpu_cluster(gpu, num_devices),
            num_items=config.env.num_groups,
        )
    except SchedError as error:
        raise UserError(str(error)) from error


def _job(config: EmbodiedConfig, known: PublishedPolicy, simulator: CpuSimulator | GpuSimulator) -> Embodied:
    options = config.policy.options
    chunk = int(options.get("chunk_size") or known.chunk_size)
    num_rounds = max(1, config.env.num_steps // chunk)
    minibatch = config.env.num_envs * num_rounds // (config.algorithm.num_minibatches * config.actor.num_shards)
    return Embodied(
        simulator=simulator,
        num_envs=config.env.num_envs,
        num_rounds=num_rounds,
        chunk_steps=chunk,
        parallel_decoding=known.parallel_decoding,
        num_cameras=_num_cameras(config),
        text_tokens=known.text_tokens,
        num_minibatches=config.algorithm.num_minibatches,
        num_epochs=config.algorithm.num_epochs,
        micro_batch=config.actor.micro_batch_size or max(1, minibatch),
        **_denoising(known, options),
    )


def _policy(config: EmbodiedConfig) -> PublishedPolicy:
    name = config.policy.name
    if name not in POLICIES:
        raise UserError(
            f"policy.name={name}: what it takes is not known before it is profiled; public figures are known of "
            f"{', '.join(POLICIES)}",
            hint="rlinf profile measures any policy where it runs; its problem file is planned like any other",
        )
    if not config.policy.options.get("folder"):
        model = POLICIES[name].model
        raise UserError(
            "policy.options.folder is not set: times are derived from the shape of a published model",
            hint=f"give --policy.options.folder FOLDER, or {model}",
        )
    return POLICIES[name]


def _shape(config: EmbodiedConfig, known: PublishedPolicy) -> ModelShape:
    """The shape in the checkpoint's folder where it is there and says so, else the published one."""
    folder = Path(str(config.policy.options["folder"]))
    reads_config = known.denoising_steps == 0 and (folder / "config.json").is_file()
    return ModelShape.from_folder(folder) if reads_config else find_model(known.model)


def _simulator(config: EmbodiedConfig, step_s: float | None) -> CpuSimulator | GpuSimulator:
    env = config.env
    if step_s is not None:
        return CpuSimulator(
            name=f"{env.id}, {step_s:g} s a step as given",
            step_s=step_s,
            cores_per_device=CORES_PER_DEVICE,
            env_device_bytes=0,
        )
    if env.kind == "libero":
        return LIBERO
    if env.simulates_on_gpu:
        return MANISKILL_PUT_ON_PLATE
    raise UserError(
        f"env.kind={env.kind}: there are no public figures of this simulator on a host's cores",
        hint="give the seconds of one step of one environment on a core, cameras included: --env-step-s 0.02",
    )


def embodied_notes(config: EmbodiedConfig, *, env_step_s: float | None = None) -> tuple[str, ...]:
    """What a plan takes for granted of an environment of which no figures are public."""
    env = config.env
    if env_step_s is not None or not env.simulates_on_gpu or env.id == PUBLIC_TASK:
        return ()
    known = MANISKILL_PUT_ON_PLATE
    return (
        f"env.id={env.id} is planned with what {known.name} costs, the one GPU simulation of which figures are public: "
        f"{known.substeps} substeps of physics in an action, one camera of 640 x 480. rlinf profile measures this one",
    )


def _denoising(known: PublishedPolicy, options: Mapping[str, Any]) -> dict[str, Any]:
    if not known.denoising_steps:
        return {}
    num_steps = int(options.get("num_denoising_steps") or known.denoising_steps)
    return {
        "denoising_steps": num_steps,
        "trained_steps": num_steps if options.get("noise") == "flow-noise" else 1,
        "predicted_actions": known.predicted_actions,
        "trains_expert_alone": options.get("trains", "expert") == "expert",
    }


def _num_cameras(config: EmbodiedConfig) -> int:
    """Those that the policy chooses, else all that the environment shows; OpenVLA looks through one."""
    if config.policy.name == "openvla":
        return 1
    chosen: Any = config.policy.options.get("cameras") or config.env.options.get("cameras") or "one"
    return len(chosen.split(",")) if isinstance(chosen, str) else len(chosen)


def _item_bytes(config: EmbodiedConfig, job: Embodied) -> dict[str, int]:
    """Of a group of environments on each channel."""
    group_size = config.env.num_envs // config.env.num_groups
    pictures = 3 * _picture_pixels(config.env) * job.num_cameras
    numbers = job.action_dim * job.chunk_steps
    return {
        "observations": group_size * pictures,
        "actions": group_size * 4 * numbers,
        "trajectories": group_size * job.num_rounds * (pictures + NUMBER_BYTES * numbers),
    }


def _picture_pixels(env: EnvConfig) -> int:
    """Of one picture, as the simulator draws it."""
    size: Any = env.options.get("image_size")
    if size:
        return size * size
    cameras: Any = env.options.get("cameras") or ()
    first = cameras if isinstance(cameras, str) else next(iter(cameras), "")
    return OWN_CAMERA_PIXELS.get(first) or OWN_PIXELS.get(env.kind, ASSUMED_PIXELS)


def _of_workers(config: EmbodiedConfig, stage: Stage, profile: StageProfile, num_devices: int) -> StageProfile:
    """The profile as the workers of `rlinf train` have it: of groups, on no more cores than there are, and with a whole
    copy of the training state on every rank unless it is sharded."""
    num_groups = config.env.num_groups
    found = profile_of_groups(profile, config.env.num_envs // num_groups, num_groups)
    if not stage.needs_device:
        on_drivers_node = min(num_devices, GPUS_PER_NODE)  # where all processes without a device are
        return on_busy_cores(found, CORES_PER_DEVICE * on_drivers_node)
    if stage.trains and not config.actor.trainer_spec.shards_state:
        return replace(found, instances=tuple(map(_whole, found.instances)))
    return found


def _whole(instance: InstanceProfile) -> InstanceProfile:
    state = instance.state_bytes + instance.sharded_state_bytes
    return replace(instance, state_bytes=state, sharded_state_bytes=0)
