"""The flows of the reasoning job, declared once for the run and for the planner; nothing here imports torch.

prompts -> rollout -> [reference] -> reward -> actor -> weights -> rollout
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlinf.config.reasoning import ReasoningConfig
from rlinf_workers import Flow

WORKERS = {
    "rollout": "rlinf_workers.roles:Rollout",
    "reference": "rlinf_workers.roles:Reference",
    "reward": "rlinf_workers.roles:Reward",
    "actor": "rlinf_workers.roles:Actor",
}
NONE: Mapping[str, Sequence[Any]] = MappingProxyType({})


def training_flow(
    config: ReasoningConfig, arguments: Mapping[str, Sequence[Any]] = NONE, *, granularities: tuple[int, ...]
) -> Flow:
    """A step of training.

    Args:
        config: resolved, see `rlinf.config.devices.resolve_for_devices`.
        arguments: worker group -> arguments of its class; a plan needs none.
        granularities: hand-overs that make sense for the actor.
    """
    flow = Flow(config.algorithm.name.rpartition(":")[2])
    for role in ("rollout", *(("reference",) if config.has_reference_worker else ()), "reward", "actor"):
        flow.worker(role, WORKERS[role], *arguments.get(role, ()))
    add_generation(flow, config)
    samples = "samples"
    if config.has_reference_worker:
        flow.stage("reference", "logprobs", reads="samples", writes="referenced")
        samples = "referenced"
    flow.stage("reward", "score", reads=samples, writes="scored", needs_device=False)
    flow.stage(
        "actor",
        "train",
        reads="scored",
        dispatch="key",
        ordered=config.actor.group_order == "index",
        trains=True,
        granularities=granularities,
        num_parts=config.actor.resolved_shards,
    )
    return flow.weights("actor", to="rollout")


def evaluation_flow(train: Flow, config: ReasoningConfig) -> Flow:
    """Answers to held-out problems, and their scores."""
    flow = Flow("evaluate").workers_of(train, "rollout", "reward")
    add_generation(flow, config)
    return flow.stage("reward", "score", reads="samples", writes="scored", needs_device=False)


def sft_warm_up_flow(train: Flow) -> Flow:
    """Supervised training of the actor."""
    flow = Flow("sft-warm-up").workers_of(train, "actor")
    return flow.stage("actor", "imitate", reads="examples", dispatch="key", ordered=True, trains=True)


def check_flow(train: Flow, config: ReasoningConfig, rollout: Any) -> Flow:
    """The engine samples and the trainer scores the same tokens (`rlinf check`).

    Args:
        rollout: settings of the rollout, which samples as in training.
    """
    flow = Flow("check").worker("rollout", WORKERS["rollout"], rollout).workers_of(train, "actor")
    add_generation(flow, config)
    flow.stage(
        "actor",
        "compare",
        reads="samples",
        writes="compared",
        dispatch="key",
        ordered=True,
        trains=True,
        num_parts=config.actor.resolved_shards,
    )
    return flow.weights("actor", to="rollout")


def add_generation(flow: Flow, config: ReasoningConfig) -> None:
    """The stage that samples."""
    span = config.rollout.devices_per_rank
    flow.stage("rollout", "generate", reads="prompts", writes="samples", devices_per_rank=span)
