"""The flows of the embodied job, declared once for the run and for the planner; nothing here imports torch.

env -> observations -> policy -> actions -> env (a cycle, pipelined by environment groups)
policy -> trajectories -> actor -> weights -> policy

Off-policy algorithms and DAgger have the same flow with another rollout and another actor, which holds the buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlinf.config.embodied import EmbodiedConfig
from rlinf_algos import DaggerAlgorithm, OffPolicyAlgorithm
from rlinf_workers import Flow

WORKERS = {
    "env": "rlinf_workers.roles:Environment",
    "policy": "rlinf_workers.roles:EmbodiedRollout",
    "actor": "rlinf_workers.roles:EmbodiedActor",
}
OFF_POLICY_WORKERS = {
    **WORKERS,
    "policy": "rlinf_workers.roles:OffPolicyRollout",
    "actor": "rlinf_workers.roles:OffPolicyActor",
}
DAGGER_WORKERS = {
    **WORKERS,
    "policy": "rlinf_workers.roles:DaggerRollout",
    "actor": "rlinf_workers.roles:DaggerActor",
}
EPISODES = "episodes"
"""Channel on which the environments report their episodes, for runs that continue or keep them."""
NONE: Mapping[str, Sequence[Any]] = MappingProxyType({})


def training_flow(
    config: EmbodiedConfig, arguments: Mapping[str, Sequence[Any]] = NONE, *, on_host: bool, reports: bool = False
) -> Flow:
    """A step of training.

    Args:
        arguments: worker group -> arguments of its class; a plan needs none.
        on_host, reports: as `join_env_and_policy`.
    """
    flow = Flow(config.algorithm.name.rpartition(":")[2], max_staleness=config.algorithm.max_staleness)
    for role, path in _workers(config).items():
        flow.worker(role, path, *arguments.get(role, ()))
    join_env_and_policy(flow, config.env.num_groups, on_host=on_host, reports=reports, ahead=config.begins_ahead)
    flow.stage(
        "actor",
        "train",
        reads="trajectories",
        dispatch="key",
        ordered=config.env.episodes_per_step is None,
        trains=True,
        whole_batch=True,
        num_parts=config.actor.num_shards,
    )
    return flow.weights("actor", to="policy")


def _workers(config: EmbodiedConfig) -> Mapping[str, str]:
    if isinstance(config.algorithm, DaggerAlgorithm):
        return DAGGER_WORKERS
    return OFF_POLICY_WORKERS if isinstance(config.algorithm, OffPolicyAlgorithm) else WORKERS


def waiting_notes(config: EmbodiedConfig) -> tuple[str, ...]:
    """What the manifest says where environments wait for the longest episodes of their step, but need not."""
    could_begin = config.algorithm.max_staleness > 0 and config.env.episodes_per_step is not None
    if config.begins_ahead or not could_begin:
        return ()
    return (
        "env.num_processes=0: environments that a step does not need any more wait for its longest episodes; with "
        "--env.num_processes 1 they begin the next step, with the same numbers",
    )


def join_env_and_policy(
    flow: Flow, num_groups: int, *, on_host: bool, reports: bool = False, ahead: bool = False
) -> None:
    """The cycle of the worker groups `env` and `policy`.

    Args:
        on_host: simulators are work for cores: beside GPUs they run on the host, but for those that simulate on a GPU,
            and a CPU slot is a core.
        reports: the environments report their episodes after each step (`Environment.interact_and_report`).
        ahead: environments without an episode of a step begin those of the next one.
    """
    sizes = tuple(size for size in range(1, num_groups + 1) if num_groups % size == 0)
    flow.stage(
        "env",
        "interact_and_report" if reports else "interact",
        reads="actions",
        writes=("observations", EPISODES) if reports else "observations",
        dispatch="key",
        ahead=ahead,
        needs_device=not on_host,
        granularities=sizes,
        num_parts=num_groups,
    )
    flow.stage(
        "policy",
        "act",
        reads="observations",
        writes=("actions", "trajectories"),
        dispatch="key",
        ahead=ahead,
        granularities=sizes,
        num_parts=num_groups,
    )
