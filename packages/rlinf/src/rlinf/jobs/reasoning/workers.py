"""Constructor arguments of the worker groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.config.agents import trainer_of
from rlinf.config.reasoning import ReasoningConfig
from rlinf.config.tasks import FilesTask
from rlinf.jobs.generation import engine_options, sampling_settings
from rlinf.jobs.named_agents import named_agents
from rlinf.jobs.rewards import reward_spec
from rlinf.jobs.training import optimizer_settings, with_base
from rlinf.run_folder.checkpoints import policy_folder
from rlinf_sched.derive import JobShape, ModelShape
from rlinf_workers.agents import EpisodeSettings, PictureSettings
from rlinf_workers.models import LoraSettings, ModelSettings, reads_pictures
from rlinf_workers.roles import ActorSettings, RewardSettings, RolloutSettings
from rlinf_workers.trainers import BackendSettings, OptimizerSettings

WARMUP_STEPS = 30
"""Optimizer steps over which the SFT warm-up's learning rate rises to its full value."""
MODEL_FOLDER = "initial_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """The settings of every worker group of a run."""

    config: ReasoningConfig
    backend: BackendSettings
    loras: Mapping[str | None, LoraSettings | None]
    """Policy -> its adapter; None: that of model.path."""
    shape: ModelShape | None
    """None: the architecture is unknown."""
    job_shape: JobShape
    max_prompt_tokens: int | None
    """None: all prompts have the same length."""
    judges_answers: bool

    def arguments(self, folder: Path) -> dict[str, tuple[Any, ...]]:
        """Worker group -> arguments of its class; `folder` is the run's."""
        config = self.config
        model = ModelSettings(
            folder=str(config.model.path or folder / MODEL_FOLDER),
            has_weights=config.model.path is not None,
            dtype=config.model.dtype,
            seed=config.seed,
        )
        arguments: dict[str, tuple[Any, ...]] = {
            "rollout": (self._rollout(model),),
            "reward": (self._reward(model),),
        }
        for trainer, policy in config.trainers.items():
            path = config.policies[policy]
            own = model if path is None else replace(model, folder=str(path), has_weights=True)
            arguments[trainer] = (self._actor(own, folder, policy),)
        if config.has_reference_worker:
            teacher = config.reference.path
            judge = model if teacher is None else replace(model, folder=str(teacher), has_weights=True)
            budget = config.actor.token_budget
            arguments["reference"] = (judge, config.rollout.temperature, self.backend, budget)
        return arguments

    def _rollout(self, model: ModelSettings) -> RolloutSettings:
        rollout, evaluation = self.config.rollout, self.config.evaluation
        num_tokens, size = rollout.max_new_tokens, self.config.algorithm.group_size
        stop = rollout.stop if evaluation.stop is None else evaluation.stop
        agent = self._agent(model)
        recording = dict(rollout.engine_spec.experts_options()) if self.config.actor.router_replay else {}
        fills_its_memory = rollout.engine_spec.fills_its_memory(rollout.engine_options)
        adapters = self.loras if self.config.syncs_adapters else {}
        return RolloutSettings(
            model=replace(
                model,
                dtype=self.config.served_dtype,
                quantization=rollout.quantization,
                adapter=adapters.get(None),
            ),
            further_adapters={
                trainer: adapter
                for trainer, policy in self.config.trainers.items()
                if policy is not None and (adapter := adapters.get(policy)) is not None
            },
            train=replace(
                sampling_settings(rollout, group_size=size, max_new_tokens=num_tokens, stop=rollout.stop),
                records_experts=self.config.actor.router_replay,
                records_kept=rollout.truncated_by is not None,
            ),
            evaluate=sampling_settings(
                evaluation, group_size=evaluation.num_samples, max_new_tokens=num_tokens, stop=stop
            ),
            max_prompt_tokens=self.max_prompt_tokens if agent is None else agent.max_prompt_tokens,
            max_batch_sequences=None if fills_its_memory else self.job_shape.max_sequences,
            engine=rollout.engine,
            engine_options=recording | engine_options(rollout, self.shape, self.job_shape),
            on_new_weights=rollout.on_new_weights,
            max_lateness=self.config.max_lateness,
            agent=agent,
        )

    def _agent(self, model: ModelSettings) -> EpisodeSettings | None:
        agent = self.config.rollout.agent
        if agent is None:
            return None
        return EpisodeSettings(
            **agent.episode_options,
            routed=self.config.routes_turns,
            agents=named_agents(agent),
            max_new_tokens=self.config.rollout.max_new_tokens,
            tokenizer_folder=model.folder,
            chat_options=self.config.chat_options,
            pictures=self._pictures_of_agents(model),
        )

    def _pictures_of_agents(self, model: ModelSettings) -> PictureSettings | None:
        """None for a model that reads text alone."""
        task, path, architecture = self.config.task, self.config.model.path, self.config.model.architecture
        if not (reads_pictures(path) if path else architecture is not None and architecture.vision_tower is not None):
            return None
        settings = PictureSettings(folder=model.folder, sends_files=self.config.run.record)
        if not isinstance(task, FilesTask):
            return settings
        limits = {"min_pixels": task.min_pixels, "max_pixels": task.max_pixels}
        return replace(settings, **limits, fetches=task.fetch_pictures)

    def _reward(self, model: ModelSettings) -> RewardSettings:
        reward = self.config.reward
        numeric = isinstance(self.config.task, FilesTask) and self.config.task.answer_format == "gsm8k"
        return RewardSettings(
            rule=reward_spec(reward, random_stands_for="numeric" if numeric else "exact"),
            random_in_training=reward.kind == "random",
            judges=self.judges_answers,
            tokenizer_folder=model.folder,
            tokenizers_of_agents={name: str(path) for name, path in self.config.rollout.agent_models.items()},
            further_policies=tuple(map(trainer_of, self.config.rollout.further_policies)),
            seed=self.config.seed,
            num_shown=self.config.run.num_samples_logged,
            max_judge_failures=self.config.run.max_judge_failures,
            cut_reward=0.0 if reward.kind == "episode" else None,
        )

    def _actor(self, model: ModelSettings, folder: Path, policy: str | None) -> ActorSettings:
        """The actor of a further policy; of that of model.path with None."""
        actor, algorithm, sft_warm_up = self.config.actor, self.config.algorithm, self.config.sft_warm_up
        return ActorSettings(
            model=model,
            algorithm=algorithm,
            optimizer=optimizer_settings(actor),
            sft_warm_up=sft_warm_up
            and OptimizerSettings(learning_rate=sft_warm_up.learning_rate, lr_warmup_steps=WARMUP_STEPS),
            critic=optimizer_settings(self.config.critic) if algorithm.has_critic else None,
            backend=self.backend,
            lora=with_base(self.loras[policy], Path(model.folder), folder, under=policy_folder(policy)),
            knows_reference=self.config.knows_reference,
            micro_batch_groups=actor.micro_batch_groups,
            max_tokens_per_micro_batch=actor.token_budget,
            router_replay=actor.router_replay,
            freeze_vision_tower=actor.freeze_vision_tower,
            balance_shards=actor.balance_shards,
            num_prompts=self.config.rollout.num_prompts,
            max_completion_tokens=self.config.rollout.max_completion_tokens,
            temperature=self.config.rollout.temperature,
            num_agents=self.config.rollout.num_trained_agents(policy),
            policy=policy or "",
        )
