"""Profiles of simulators, from public throughput. An item is an environment slot, a round one hand-over of actions.

A GPU-parallel simulator steps all environments of a device in one launch: but for the cameras, its time hardly depends
on their number. A CPU-bound one runs a process for each environment: more processes slow each other a little up to the
number of cores, then share them. The cores of a node are divided among its devices, so environments on few devices have
few cores.

A simulator and a policy on one GPU take turns, as stages of a cycle on shared devices do in a plan. In a run their
processes hold one lease and may compute at once where a GPU's environments come in several hand-overs; the driver gives
graphics and CUDA contexts exclusive slices of time then, and two simulations on one GPU take twice as long each
(mani-skill/ManiSkill, issue 524). What a change of context costs beside that is not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlinf_sched.derive.datasheets import GPUS_PER_NODE, find_gpu
from rlinf_sched.derive.training import powers_up_to
from rlinf_sched.profile import InstanceProfile, StageProfile, TimePoint


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSimulator:
    """Physics and cameras of many environments on one GPU."""

    name: str
    substeps: int
    """Physics substeps in one control step: sim_freq / control_freq."""
    substep_s: float
    """Seconds of one substep, whatever the number of environments."""
    env_substep_s: float
    """Further seconds of one substep for each environment."""
    env_render_s: float
    """Seconds to render one environment's cameras, once a control step."""
    base_bytes: int
    env_bytes: int
    task: str = ""
    """Id of the environment that the figures are of, or the nearest to it; "": they do not depend on it."""
    settings: str = ""
    """Of that environment, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuSimulator:
    """One process for each environment, on the cores of the host."""

    name: str
    step_s: float
    """Seconds of one simulator step of one environment on one core: physics and controller."""
    draw_s: float = 0.0
    """Further seconds to draw its cameras."""
    cores_per_device: int
    """Cores of the host for each GPU of the node."""
    env_device_bytes: int
    """Bytes that one environment's rendering context takes on the GPU."""


_CARTPOLE_STATE_FPS, _PICK_CUBE_STATE_FPS, _PICK_CUBE_RGB_FPS = 2_537_724, 318_580, 18_549
_BENCHMARK_ENVS, _BENCHMARK_SUBSTEPS, _BENCHMARK_PIXELS = 4096, 2, 128 * 128
"""ManiSkill's page on performance benchmarking, one RTX 4090: physics of 4,096 environments, cameras of 128 x 128. Both
benchmark tasks take two substeps in a control step (120 and 60 Hz, 100 and 50 Hz)."""

# the lightest scene is all launches and hardly any work
_LAUNCH_S = _BENCHMARK_ENVS / _CARTPOLE_STATE_FPS / _BENCHMARK_SUBSTEPS
_ENV_S = 1 / _PICK_CUBE_STATE_FPS / _BENCHMARK_SUBSTEPS - _LAUNCH_S / _BENCHMARK_ENVS
_RENDER_S = 1 / _PICK_CUBE_RGB_FPS - 1 / _PICK_CUBE_STATE_FPS

MANISKILL_BRIDGE_PIXELS = 640 * 480
"""Of the picture of the bridge scenes' one camera, `3rd_view_camera`."""

_BRIDGE_ENVS, _BRIDGE_STEP_S = 72, 60 / 60 - 0.04
"""Environments of ManiSkill's bridge scenes on one GPU, and seconds of their control step: 72 episodes of 60 steps with
octo-small take about a minute (simpler-env/SimplerEnv, pull request 38), with 0.04 s of a step for the policy (issue 83
there)."""
_BRIDGE_SUBSTEPS = 100
"""500 Hz and 5 Hz, the task's public settings."""
_BRIDGE_RENDER_S = _RENDER_S * MANISKILL_BRIDGE_PIXELS / _BENCHMARK_PIXELS
"""The cost of a picture is taken as linear in its pixels."""

MANISKILL_PUT_ON_PLATE = GpuSimulator(
    name="ManiSkill PutOnPlateInScene",
    substeps=_BRIDGE_SUBSTEPS,
    substep_s=(_BRIDGE_STEP_S - _BRIDGE_ENVS * _BRIDGE_RENDER_S) / _BRIDGE_SUBSTEPS - _BRIDGE_ENVS * _ENV_S,
    env_substep_s=_ENV_S,
    env_render_s=_BRIDGE_RENDER_S,
    base_bytes=2 * 10**9,  # CUDA and Vulkan contexts, PhysX buffers
    env_bytes=70 * 10**6,  # 2.2 GB for 32 rendered environments (ManiSkill's notes on rendering memory)
    task="PutCarrotOnPlateInScene-v1",
    settings=f"{_BRIDGE_SUBSTEPS} substeps of physics in an action, one camera of 640 x 480",
)
"""What an environment more costs is the benchmark's, on an RTX 4090; the rest of the measured step is all launches. Not
scaled to other GPUs: launches do not scale, and data-centre GPUs have fewer raster units."""

_LIBERO_STEPS_PER_S = 11.2
"""Steps of LIBERO-Spatial in one process, two pictures of 256 x 256 drawn without a GPU, resets included (vla-eval's
tuning guide, table of demand)."""
_LIBERO_PHYSICS_S = 1 / 70
"""Seconds of physics and controller alone, measured by this project."""
BUSY_CORE_LOSS = 0.35
"""Share of its rate that a process loses when all cores are busy, and proportionally less before. The same table: 11.2
steps/s of one process, 9.5 of each of 16, 8.3 of 32, 7.3 of 50; its host is taken to have the 48 cores of the guide's
example. On two cores of another machine it was 0.3 (this project)."""

CORES_PER_DEVICE = find_gpu("H100").node_cores // GPUS_PER_NODE
"""Cores of the host for each GPU of a node."""

LIBERO = CpuSimulator(
    name="LIBERO",
    step_s=_LIBERO_PHYSICS_S,
    draw_s=1 / _LIBERO_STEPS_PER_S - _LIBERO_PHYSICS_S,
    cores_per_device=CORES_PER_DEVICE,
    env_device_bytes=300 * 10**6,  # an EGL context with its textures
)
"""LIBERO, which simulates and renders on CPU cores."""

SIMULATORS: Mapping[str, GpuSimulator | CpuSimulator] = {
    simulator.name: simulator for simulator in (MANISKILL_PUT_ON_PLATE, LIBERO)
}
"""Name -> a simulator whose figures are public."""


def gpu_simulator_profile(
    simulator: GpuSimulator, *, steps_per_round: int = 1, num_envs: int, num_rounds: int
) -> StageProfile:
    """The profile of `num_envs` environments that stay on their devices over all rounds of a step.

    A hand-over may hold all of a device's environments or some of them; cameras draw once a round.
    """
    num_substeps = steps_per_round * simulator.substeps
    flat_s = num_substeps * simulator.substep_s
    env_s = num_substeps * simulator.env_substep_s + simulator.env_render_s
    points = tuple(TimePoint(num_items=n, seconds=flat_s + n * env_s) for n in powers_up_to(num_envs))
    instance = InstanceProfile(
        points=points, state_bytes=simulator.base_bytes, sharded_state_bytes=simulator.env_bytes * num_envs
    )
    return StageProfile(
        instances=(instance,),
        batching="sum",
        rounds=num_rounds,
        source=f"derived: {simulator.name} from ManiSkill's public benchmark on an RTX 4090",
    )


def cpu_simulator_profile(
    simulator: CpuSimulator, *, steps_per_round: int, num_envs: int, num_rounds: int
) -> StageProfile:
    """The profile of a simulator on the cores beside each device; the device itself only draws the camera images.

    Each environment is a process. Cameras draw at every step.
    """
    cores, round_s = simulator.cores_per_device, steps_per_round * (simulator.step_s + simulator.draw_s)
    counts = sorted({*powers_up_to(num_envs), min(cores, num_envs)})
    points = tuple(TimePoint(num_items=n, seconds=slowed(n, cores) * round_s) for n in counts)
    instance = InstanceProfile(points=points, sharded_state_bytes=simulator.env_device_bytes * num_envs)
    return StageProfile(
        instances=(instance,),
        batching="sum",
        rounds=num_rounds,
        source=f"derived: {simulator.name}, {cores} cores for each device",
    )


def host_simulator_profile(
    simulator: CpuSimulator, *, steps_per_round: int, num_envs: int, num_rounds: int
) -> StageProfile:
    """The profile of processes on the host's cores, each of which steps its environments one after the other and draws
    what the policy is shown: once a round."""
    round_s = steps_per_round * simulator.step_s + simulator.draw_s
    points = tuple(TimePoint(num_items=n, seconds=n * round_s) for n in powers_up_to(num_envs))
    return StageProfile(
        instances=(InstanceProfile(num_devices=0, points=points),),
        batching="sum",
        rounds=num_rounds,
        source=f"derived: {simulator.name}, a process a core",
    )


def on_busy_cores(profile: StageProfile, num_cores: int) -> StageProfile:
    """The profile of a stage of processes on a host with so many cores, one process a core, from that of one process
    alone: the more there are the slower is each."""
    numbers = powers_up_to(num_cores)
    (alone,) = profile.instances
    instances = tuple(_slower(alone, number, slowed(number, num_cores)) for number in numbers)
    return replace(profile, instances=instances, max_instances=num_cores)


def slowed(num_processes: int, num_cores: int) -> float:
    """How many times as long a process takes as alone."""
    busy = min(1.0, num_processes / num_cores)
    return max(1.0, num_processes / num_cores) / (1 - BUSY_CORE_LOSS * busy)


def _slower(alone: InstanceProfile, num_ranks: int, factor: float) -> InstanceProfile:
    points = tuple(replace(point, seconds=factor * point.seconds) for point in alone.points)
    return replace(alone, num_ranks=num_ranks, points=points)
