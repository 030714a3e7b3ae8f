"""Ready-made problems: reasoning RL with GRPO and PPO, embodied RL, and the five workloads of arXiv:2509.15965 with
their published settings. What the paper does not specify follows the public recipes of the same jobs; each choice is
documented.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rlinf_sched.derive.datasheets import gpu_cluster
from rlinf_sched.derive.generation import MAX_RUNNING_SEQUENCES
from rlinf_sched.derive.lengths import MEAN_SHARE_OF_LIMIT, Lengths
from rlinf_sched.derive.profiles import Embodied, Reasoning, derive_profiles
from rlinf_sched.derive.shapes import ModelShape
from rlinf_sched.derive.simulators import LIBERO, MANISKILL_BRIDGE_PIXELS, MANISKILL_PUT_ON_PLATE
from rlinf_sched.derive.training import Sharding
from rlinf_sched.errors import ProblemError, did_you_mean
from rlinf_sched.flow_graph import FlowGraph, Stage, WeightEdge
from rlinf_sched.problem import Problem

_TOKEN_BYTES = 12
"""Bytes of one token on a channel: an int32 id, an fp32 log-probability and a mask or advantage."""
_PIXEL_BYTES = 3
"""Bytes of a pixel of what a policy reads: three colours of 8 bits."""
_PROMPT_LIMIT = 1024
"""Tokens of the sequence limit that are reserved for the prompt (public recipes of these jobs)."""


def grpo(
    *,
    model: str | Path | ModelShape = "Qwen2.5-7B",
    gpu: str = "H100",
    num_devices: int = 64,
    num_prompts: int = 512,
    group_size: int = 8,
    sequence_tokens: int = 28_672,
    mean_tokens: float | None = None,
    max_staleness: int = 0,
    sharding: Sharding = "model",
    max_running_sequences: int = MAX_RUNNING_SEQUENCES,
) -> Problem:
    """GRPO with answers checked by rule: rollout, proximal log-probabilities, reward, training.

    Args:
        model: a public model's name, the folder of one, or a shape.
        num_prompts: groups in a step.
        sequence_tokens: most tokens of prompt and answer together.
        mean_tokens: mean tokens of an answer; None: `MEAN_SHARE_OF_LIMIT` of the longest.
        max_staleness: steps that generation may run ahead; 0 is synchronous.
        sharding: how training shares a model out; "data": its state over the data ranks, as FSDP does; "model": its
            matrices and layers.
        max_running_sequences: most sequences in one engine at once.
    """
    flow = FlowGraph(
        name="grpo",
        stages=(
            Stage(name="rollout", worker="rollout", role="rollout", reads=("prompts",), writes=("samples",)),
            Stage(name="logprobs", worker="logprobs", role="reference", reads=("samples",), writes=("recomputed",)),
            _reward(reads="recomputed"),
            Stage(name="actor", worker="actor", role="actor", reads=("scored",), trains=True),
        ),
        weight_edges=(
            WeightEdge(source="actor", target="rollout"),
            WeightEdge(source="actor", target="logprobs"),  # it recomputes with the weights that are about to train
        ),
        feeds=("prompts",),
        max_staleness=max_staleness,
    )
    job = _job(num_prompts, group_size, sequence_tokens, mean_tokens, sharding, max_running_sequences)
    return _reasoning(flow, model, gpu, num_devices, job)


def ppo(
    *,
    model: str | Path | ModelShape = "Qwen2.5-7B",
    gpu: str = "H100",
    num_devices: int = 32,
    num_prompts: int = 512,
    group_size: int = 1,
    sequence_tokens: int = 28_672,
    mean_tokens: float | None = None,
    max_staleness: int = 0,
    sharding: Sharding = "model",
    max_running_sequences: int = MAX_RUNNING_SEQUENCES,
) -> Problem:
    """PPO with a critic of the model's own size: rollout, reference, reward, values, training of critic and actor.

    Arguments as for `grpo`; a group is one answer, as is usual for PPO.
    """
    flow = FlowGraph(
        name="ppo",
        stages=(
            Stage(name="rollout", worker="rollout", role="rollout", reads=("prompts",), writes=("samples",)),
            Stage(name="reference", worker="reference", role="reference", reads=("samples",), writes=("referenced",)),
            _reward(reads="referenced"),
            Stage(
                name="values",
                worker="critic",
                role="critic",
                reads=("scored",),
                writes=("valued", "returns"),
            ),
            Stage(name="critic", worker="critic", role="critic", reads=("returns",), trains=True),
            Stage(name="actor", worker="actor", role="actor", reads=("valued",), trains=True),
        ),
        weight_edges=(WeightEdge(source="actor", target="rollout"),),
        feeds=("prompts",),
        max_staleness=max_staleness,
    )
    job = _job(num_prompts, group_size, sequence_tokens, mean_tokens, sharding, max_running_sequences)
    return _reasoning(flow, model, gpu, num_devices, job)


def embodied(
    job: Embodied,
    *,
    model: str | Path | ModelShape = "OpenVLA-7B",
    gpu: str = "H100",
    num_devices: int = 8,
) -> Problem:
    """A policy and its simulator in a cycle, then training on the trajectories of all environments."""
    shown_bytes = _PIXEL_BYTES * job.picture_pixels * job.num_cameras
    flow = FlowGraph(
        name="embodied",
        stages=(
            Stage(name="env", worker="env", role="env", reads=("actions",), writes=("observations",), dispatch="key"),
            Stage(
                name="policy",
                worker="policy",
                role="rollout",
                reads=("observations",),
                writes=("actions", "trajectories"),
            ),
            Stage(name="actor", worker="actor", role="actor", reads=("trajectories",), trains=True, whole_batch=True),
        ),
        weight_edges=(WeightEdge(source="actor", target="policy"),),
        item_bytes={
            "observations": shown_bytes,
            "actions": 4 * job.action_tokens,
            "trajectories": job.num_rounds * (shown_bytes + _TOKEN_BYTES * job.action_tokens),
        },
    )
    return Problem(
        flow=flow,
        profiles=derive_profiles(flow, model=model, gpu=gpu, job=job),
        cluster=gpu_cluster(gpu, num_devices),
        num_items=job.num_envs,
    )


MANISKILL = Embodied(
    simulator=MANISKILL_PUT_ON_PLATE, num_envs=256, num_rounds=80, picture_pixels=MANISKILL_BRIDGE_PIXELS
)
"""OpenVLA, one action of 7 tokens a round (the paper: 256 environments, 80 steps)."""
LIBERO_OFT = Embodied(
    simulator=LIBERO, num_envs=512, num_rounds=64, chunk_steps=8, parallel_decoding=True, text_tokens=40
)
"""OpenVLA-OFT, eight actions of 7 tokens from one forward pass (the paper: 512 environments, 64 steps)."""

WORKLOADS: Mapping[str, Callable[[], Problem]] = {
    "grpo-qwen2.5-7b-64": grpo,
    "ppo-qwen2.5-7b-32": ppo,
    "grpo-qwen3-30b-a3b-32": lambda: _qwen3(32),
    "grpo-qwen3-30b-a3b-128": lambda: _qwen3(128),
    "maniskill-openvla-8": lambda: embodied(MANISKILL, num_devices=8),
    "maniskill-openvla-16": lambda: embodied(MANISKILL, num_devices=16),
    "maniskill-openvla-32": lambda: embodied(MANISKILL, num_devices=32),
    "libero-openvla-oft-8": lambda: embodied(LIBERO_OFT, model="OpenVLA-OFT", num_devices=8),
    "libero-openvla-oft-16": lambda: embodied(LIBERO_OFT, model="OpenVLA-OFT", num_devices=16),
    "libero-openvla-oft-32": lambda: embodied(LIBERO_OFT, model="OpenVLA-OFT", num_devices=32),
}
"""The paper's workloads on H100s, by name and number of devices."""


def workload(name: str) -> Problem:
    """The workload of that name.

    Raises:
        ProblemError: there is none; says which there are.
    """
    if name not in WORKLOADS:
        raise ProblemError(f"workload={name!r}{did_you_mean(name, WORKLOADS)}")
    return WORKLOADS[name]()


def _qwen3(num_devices: int) -> Problem:
    """The paper: batch 1,536, sequences of 20,480. A batch counts prompts, here as in `grpo`; groups of 16 as in the
    public recipe of this model."""
    return grpo(model="Qwen3-30B-A3B", num_devices=num_devices, num_prompts=1536, group_size=16, sequence_tokens=20_480)


def _reward(*, reads: str) -> Stage:
    return Stage(name="reward", worker="reward", role="reward", reads=(reads,), writes=("scored",), needs_device=False)


def _job(
    num_prompts: int,
    group_size: int,
    sequence_tokens: int,
    mean_tokens: float | None,
    sharding: Sharding,
    max_running_sequences: int,
) -> Reasoning:
    limit = sequence_tokens - min(_PROMPT_LIMIT, sequence_tokens // 2)
    mean = limit * MEAN_SHARE_OF_LIMIT if mean_tokens is None else mean_tokens
    return Reasoning(
        lengths=Lengths(mean_tokens=mean, limit_tokens=limit, group_size=group_size),
        num_groups=num_prompts,
        sharding=sharding,
        max_running_sequences=max_running_sequences,
    )


def _reasoning(flow: FlowGraph, model: str | Path | ModelShape, gpu: str, num_devices: int, job: Reasoning) -> Problem:
    group_bytes = round(_TOKEN_BYTES * job.lengths.group_tokens)
    item_bytes = {channel: group_bytes for channel in flow.channels if channel not in flow.feeds}
    return Problem(
        flow=replace(flow, item_bytes=item_bytes),
        profiles=derive_profiles(flow, model=model, gpu=gpu, job=job),
        cluster=gpu_cluster(gpu, num_devices),
        num_items=job.num_groups,
    )
