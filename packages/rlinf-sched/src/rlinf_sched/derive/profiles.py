"""Profiles of a whole flow from a model's shape and a GPU's datasheet, by the roles of its stages."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf_sched.derive.datasheets import Gpu, find_gpu
from rlinf_sched.derive.generation import MAX_RUNNING_SEQUENCES, Engine, act_profile, generate_profile
from rlinf_sched.derive.lengths import Lengths
from rlinf_sched.derive.shapes import ModelShape, resolve_model
from rlinf_sched.derive.simulators import (
    CpuSimulator,
    GpuSimulator,
    cpu_simulator_profile,
    gpu_simulator_profile,
    host_simulator_profile,
)
from rlinf_sched.derive.training import (
    NUM_MINIBATCHES,
    Sharding,
    forward_profile,
    powers_up_to,
    sequence_arguments,
    train_profile,
)
from rlinf_sched.errors import ProfileError
from rlinf_sched.flow_graph import FlowGraph, Stage
from rlinf_sched.profile import InstanceProfile, Profiles, StageProfile, TimePoint

RULE_REWARD_S = 0.44e-3
"""Seconds to check one answer by rule on one core: this project's numeric rewards check 2,279 answers a second of a
core, math-verify 241 (benchmarks/results/math-rewards.json)."""
HOST_PROCESSES = 64
"""Most processes that a host stage may have: a node has cores enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reasoning:
    """The sizes of a reasoning RL step."""

    lengths: Lengths
    num_groups: int
    sharding: Sharding = "model"
    num_minibatches: int = NUM_MINIBATCHES
    max_running_sequences: int = MAX_RUNNING_SEQUENCES

    def __post_init__(self) -> None:
        _check_counts(self, "num_groups", "num_minibatches", "max_running_sequences")


@dataclass(frozen=True, kw_only=True, slots=True)
class Embodied:
    """The sizes of an embodied RL step.

    Example: OpenVLA in ManiSkill, one action a round: `Embodied(simulator=MANISKILL_PUT_ON_PLATE, num_envs=256,
    num_rounds=80)`.
    """

    simulator: GpuSimulator | CpuSimulator
    num_envs: int
    num_rounds: int
    """Observations per environment in a step, each with one action chunk."""
    chunk_steps: int = 1
    """Simulator steps per action chunk."""
    parallel_decoding: bool = False
    """True: one forward pass computes all tokens of an action chunk (OpenVLA-OFT)."""
    denoising_steps: int = 0
    """Steps of the model's expert from noise to an answer (pi0)."""
    trained_steps: int = 0
    """Those of them whose log-probabilities are trained: 1 for Flow-SDE, all for Flow-Noise (arXiv:2510.25889)."""
    predicted_actions: int = 0
    """Actions that the expert denoises, of which `chunk_steps` are executed; 0: those alone."""
    trains_expert_alone: bool = False
    """True: images and text go through a decoder that stays as it is."""
    num_cameras: int = 1
    picture_pixels: int = 224 * 224
    """Pixels of one camera's picture as rendered and sent."""
    action_dim: int = 7
    text_tokens: int = 30
    """Tokens of an instruction with its template."""
    engine: Engine = "eager"
    sharding: Sharding = "data"
    num_minibatches: int = 1
    num_epochs: int = 1
    num_trained: int | None = None
    """Observations in all updates of a step, drawn from a buffer; None: those of the step, `num_epochs` times."""
    micro_batch: int = 32
    """Observations in one forward and backward pass; public recipes have 32 to 40."""

    def __post_init__(self) -> None:
        counts = ("num_envs", "num_rounds", "chunk_steps", "num_cameras", "picture_pixels", "action_dim")
        _check_counts(self, *counts, "num_minibatches", "num_epochs", "micro_batch")

    @property
    def action_tokens(self) -> int:
        """Tokens of one answer: an expert has one for each action, a decoder for each of its numbers."""
        if self.denoising_steps:
            return self.predicted_actions or self.chunk_steps
        return self.action_dim * self.chunk_steps


def derive_profiles(
    flow: FlowGraph, *, model: str | Path | ModelShape, gpu: str | Gpu, job: Reasoning | Embodied
) -> Profiles:
    """Profiles of every stage of `flow`; all roles have the same model.

    What a stage does follows from its role and its place, in this order: it trains; it has no device (a rule on the
    host); it is an env; it is a rollout or a policy; otherwise it makes one forward pass (reference, critic).

    Args:
        model: a public model's name, the folder of one with its config.json, or a shape.
        gpu: a name in `GPUS`, or a datasheet.

    Raises:
        ProfileError, ClusterError: an unknown model or GPU, or a stage that the job has no numbers for.
    """
    shape, sheet = resolve_model(model), gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    if isinstance(job, Reasoning):
        return Profiles(stages={stage.name: _reasoning(stage, shape, sheet, job) for stage in flow.stages})
    return Profiles(stages={stage.name: _embodied(stage, shape, sheet, job) for stage in flow.stages})


def rule_profile(answers_per_item: int, max_items: int) -> StageProfile:
    """The profile of a stage without a device that checks answers by rule."""
    seconds = RULE_REWARD_S * answers_per_item
    points = tuple(TimePoint(num_items=n, seconds=n * seconds) for n in powers_up_to(max_items))
    source = f"derived: a rule of {RULE_REWARD_S * 1e3:.2g} ms for each answer"
    instances = (InstanceProfile(num_devices=0, points=points),)
    return StageProfile(instances=instances, max_instances=HOST_PROCESSES, source=source)


def _reasoning(stage: Stage, model: ModelShape, gpu: Gpu, job: Reasoning) -> StageProfile:
    arguments = sequence_arguments(job.lengths, max_items=job.num_groups)
    if not stage.needs_device:
        return rule_profile(job.lengths.group_size, job.num_groups)
    if stage.trains:
        return train_profile(model, gpu, sharding=job.sharding, num_minibatches=job.num_minibatches, **arguments)
    if stage.role == "rollout":
        return generate_profile(
            model, gpu, job.lengths, max_items=job.num_groups, max_running_sequences=job.max_running_sequences
        )
    if stage.role == "env":
        raise ProfileError(f"stage {stage.name!r} has the role 'env'; derive it from an Embodied job")
    return forward_profile(model, gpu, **arguments)


def _embodied(stage: Stage, model: ModelShape, gpu: Gpu, job: Embodied) -> StageProfile:
    if model.expert is not None and not job.denoising_steps:
        raise ProfileError(f"{model.name} denoises its actions; give the job denoising_steps")
    tokens = job.num_cameras * model.num_patches + job.text_tokens + (0 if model.expert else job.action_tokens)
    if stage.role == "env":
        simulator, counts = job.simulator, {"num_envs": job.num_envs, "num_rounds": job.num_rounds}
        if isinstance(simulator, GpuSimulator):
            return gpu_simulator_profile(simulator, steps_per_round=job.chunk_steps, **counts)
        simulate = cpu_simulator_profile if stage.needs_device else host_simulator_profile
        return simulate(simulator, steps_per_round=job.chunk_steps, **counts)
    if not stage.needs_device:
        return rule_profile(1, job.num_envs)
    if stage.trains:
        return _train_policy(model, gpu, job, tokens)
    if stage.role in ("rollout", "policy"):
        at_once = job.parallel_decoding or model.expert is not None
        return act_profile(
            model,
            gpu,
            text_tokens=job.text_tokens,
            decode_tokens=0 if at_once else job.action_tokens,
            parallel_tokens=job.action_tokens if at_once else 0,
            denoising_steps=job.denoising_steps,
            num_cameras=job.num_cameras,
            num_rounds=job.num_rounds,
            max_items=job.num_envs,
            engine=job.engine,
        )
    return forward_profile(model, gpu, **_samples(job, job.num_rounds, tokens))


def _train_policy(model: ModelShape, gpu: Gpu, job: Embodied, tokens: int) -> StageProfile:
    """Training on every observation of an item, as often as there are epochs, or on an item's share of those that are
    drawn from a buffer."""
    num_samples = job.num_rounds * job.num_epochs if job.num_trained is None else job.num_trained / job.num_envs
    images = num_samples * job.num_cameras * model.vision_flops
    train: dict[str, Any] = {"sharding": job.sharding, "num_minibatches": job.num_minibatches * job.num_epochs}
    whole = _samples(job, num_samples, tokens)
    if model.expert is None:
        return train_profile(model, gpu, extra_item_flops=images, **train, **whole)
    expert, num_tokens = model.expert, job.trained_steps * job.action_tokens
    if not job.trains_expert_alone:
        denoising = num_samples * num_tokens * expert.forward_flops(tokens)
        return train_profile(model, gpu, extra_item_flops=images + denoising, **train, **whole)
    read = images + num_samples * tokens * model.forward_flops(tokens / 2)
    samples: dict[str, Any] = {**_samples(job, num_samples, num_tokens), "context_tokens": float(tokens)}
    profile = train_profile(expert, gpu, frozen_item_flops=read, **train, **samples)
    frozen = model.weights_bytes - expert.weights_bytes
    instances = tuple(replace(one, state_bytes=one.state_bytes + frozen) for one in profile.instances)
    return replace(profile, instances=instances, weights_bytes=model.weights_bytes)


def _samples(job: Embodied, num_samples: float, tokens: int) -> dict[str, Any]:
    """The arguments that describe items of so many samples to `train_profile` and `forward_profile`."""
    return {
        "item_tokens": float(num_samples * tokens),
        "context_tokens": tokens / 2,
        "micro_batch_tokens": job.micro_batch * tokens,
        "max_items": job.num_envs,
    }


def _check_counts(job: Reasoning | Embodied, *keys: str) -> None:
    for key in keys:
        if getattr(job, key) < 1:
            raise ProfileError(f"{key}={getattr(job, key)} must be at least 1")
