from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf.config.inputs import check_model_folder, model_family
from rlinf.config.reasoning import AUTO_ENGINE, ReasoningConfig
from rlinf.config.rewards import FunctionReward, JudgeReward, ModelReward, RewardConfig, members_of
from rlinf.config.tasks import FilesTask
from rlinf.jobs.checks import check_data, refused
from rlinf.jobs.spec import JobSpec, with_shards
from rlinf_algos import Registry
from rlinf_workers.plugins import ENGINES, TRAINERS

if TYPE_CHECKING:
    from rlinf.machine import Machine
    from rlinf.planning.memory import Load
    from rlinf_sched import Cluster, Plan, Problem


@dataclass(frozen=True, kw_only=True)
class ReasoningSpec(JobSpec):
    """A language model learns to answer, from rewards alone."""

    def names(self, config: ReasoningConfig) -> Iterable[tuple[Registry[Any], str, str]]:
        yield TRAINERS, config.actor.backend, f"actor.backend={config.actor.backend}"
        if config.rollout.engine != AUTO_ENGINE:
            yield ENGINES, config.rollout.engine, f"rollout.engine={config.rollout.engine}"

    def check_references(self, config: ReasoningConfig) -> None:
        for key, path in config.model_paths.items():
            if path is not None:
                check_model_folder(path, key=key)
        _check_reward(config.reward, "reward")
        if isinstance(task := config.task, FilesTask):
            check_data(task.all_files)

    def resolve_for_devices(self, config: ReasoningConfig, num_devices: int) -> ReasoningConfig:
        """As far as the prompts of an optimizer step and the SFT warm-up's batch allow."""
        most = config.rollout.num_prompts // config.algorithm.num_minibatches
        return with_shards(
            config, num_devices, most=most, whole=config.sft_warm_up.batch_size if config.sft_warm_up else 0
        )

    def settle(self, config: ReasoningConfig, machine: Machine) -> ReasoningConfig:
        if config.rollout.engine != AUTO_ENGINE:
            return config
        from rlinf.jobs.reasoning.engine_choice import choose_engine

        return choose_engine(config, machine)

    def settle_for_plan(self, config: ReasoningConfig, num_devices: int, *, gpu: str) -> ReasoningConfig:
        if config.rollout.engine != AUTO_ENGINE:
            return config
        from rlinf.jobs.reasoning.engine_choice import choose_planned_engine

        return choose_planned_engine(config, num_devices, gpu)

    def preload(self, config: ReasoningConfig) -> Sequence[str]:
        family = config.model.architecture.family if config.model.architecture else model_family(config.model.path)
        model = [f"transformers.models.{family}.modeling_{family}"] if family else []
        engine = [config.rollout.engine_spec.module] if "rollout" not in config.venvs else []
        roles = [f"rlinf_workers.{role}" for role in ROLES]
        roles += ["rlinf_workers.roles.language.session_router"] if config.rollout.agent is not None else []
        return [*roles, *engine, *model, "transformers.tokenization_utils_tokenizers"]

    def problem(self, config: ReasoningConfig, num_devices: int, *, gpu: str, env_step_s: float | None) -> Problem:
        from rlinf.jobs.reasoning.planning import reasoning_problem

        return reasoning_problem(config, num_devices, gpu=gpu, env_step_s=env_step_s)

    def plan_notes(self, config: ReasoningConfig, cluster: Cluster, *, env_step_s: float | None) -> Sequence[str]:
        from rlinf.jobs.reasoning.planning import budget_notes, turn_notes

        return [*budget_notes(config, cluster), *turn_notes(config)]

    def loads(self, config: ReasoningConfig, plan: Plan, cluster: Cluster) -> list[Load]:
        from rlinf.jobs.reasoning.planning import reasoning_loads

        return reasoning_loads(config, plan, cluster)


def _check_reward(reward: RewardConfig, key: str) -> None:
    for place, member in members_of(reward, key).items():
        _check_reward(member, place)
    match reward:
        case ModelReward() | JudgeReward():
            check_model_folder(reward.path, key=f"{key}.path")
        case FunctionReward():
            refused(Registry("reward").locate, reward.path, f"{key}.path={reward.path}")


ROLES = (
    *("roles.language.actor", "roles.language.reference", "roles.language.reward", "roles.language.rollout"),
    "trainers.replicated.backend",
)
SPEC = ReasoningSpec(
    name="reasoning",
    implementation="rlinf.jobs.reasoning.job:ReasoningJob",
    config=ReasoningConfig,
    resumable=("actor.backend", "actor.backend_options"),
    samples_text=True,
)
