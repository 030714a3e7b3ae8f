from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.config.embodied import AUTO, EmbodiedConfig
from rlinf.jobs.checks import check_file, refused
from rlinf.jobs.spec import JobSpec
from rlinf_algos import DaggerAlgorithm, OffPolicyAlgorithm, Registry
from rlinf_workers.plugins import POLICIES, TRAINERS
from rlinf_workers.policies import FOLDER_OPTIONS

if TYPE_CHECKING:
    from rlinf.jobs.base import Job
    from rlinf.machine import Machine
    from rlinf_envs import KindSpec
    from rlinf_sched import Cluster, Problem
    from rlinf_workers.launchers import Interpreter


@dataclass(frozen=True, kw_only=True)
class EmbodiedSpec(JobSpec):
    """A robot learns a task in simulation."""

    def names(self, config: EmbodiedConfig) -> Iterable[tuple[Registry[Any], str, str]]:
        yield TRAINERS, config.actor.backend, f"actor.backend={config.actor.backend}"
        if config.policy.name != AUTO:
            yield POLICIES, config.policy.name, "policy.name"

    def check_references(self, config: EmbodiedConfig) -> None:
        if config.env.kind == "import" and ":" in config.env.id and "env" not in config.venvs:
            refused(Registry("environment").locate, config.env.id, f"env.id={config.env.id!r}")
        for option in FOLDER_OPTIONS:
            folder = config.policy.options.get(option)
            if isinstance(folder, str) and config.policy.name in POLICIES.names():
                hint = "give the folder of a checkpoint, or the name of one on the Hub, ORG/NAME"
                check_file(Path(folder), f"policy.options.{option}", hint)
        for section in (config.sft_warm_up, config.demonstrations, config.success_classifier):
            if section is not None and section.path is not None:
                check_file(section.path, f"{section.AT}.path", "check the path of the demonstrations")

    def env_kinds(self, config: EmbodiedConfig) -> Sequence[KindSpec]:
        return (config.env.spec,)

    def preload(self, config: EmbodiedConfig) -> Sequence[str]:
        roles = ON_POLICY
        if isinstance(config.algorithm, OffPolicyAlgorithm):
            roles = OFF_POLICY
        elif isinstance(config.algorithm, DaggerAlgorithm):
            roles = DAGGER
        return [f"rlinf_workers.{role}" for role in (*ROLES, *roles)]

    def problem(self, config: EmbodiedConfig, num_devices: int, *, gpu: str, env_step_s: float | None) -> Problem:
        from rlinf.jobs.embodied.planning import embodied_problem

        return embodied_problem(config, num_devices, gpu=gpu, env_step_s=env_step_s)

    def plan_notes(self, config: EmbodiedConfig, cluster: Cluster, *, env_step_s: float | None) -> Sequence[str]:
        from rlinf.jobs.embodied.planning import embodied_notes

        return embodied_notes(config, env_step_s=env_step_s)

    def make(self, config: EmbodiedConfig, machine: Machine, venvs: Mapping[str, Interpreter]) -> Job:
        return self.load()(config, machine, venvs["env"].path if "env" in venvs else None)


ROLES = ("roles.embodied.environment", "trainers.replicated.backend")
ON_POLICY = ("roles.embodied.rollout", "roles.embodied.actor")
OFF_POLICY = ("roles.embodied.off_policy_rollout", "roles.embodied.off_policy_actor")
DAGGER = ("roles.embodied.dagger_rollout", "roles.embodied.dagger_actor")
SPEC = EmbodiedSpec(
    name="embodied",
    implementation="rlinf.jobs.embodied.job:EmbodiedJob",
    config=EmbodiedConfig,
    resumable=("actor.backend", "actor.backend_options", "env.num_eval_videos", "env.episodes_megabytes"),
    acts=True,
)
