"""How the embodied job learns: on-policy from the segments of a step, off-policy from a replay buffer, or from an
expert that it asks (`dagger_learning`). Each has its own rollout and actor; `learning_of` chooses by the type of the
section `algorithm`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from rlinf.config.embodied import EmbodiedConfig
from rlinf.errors import UserError
from rlinf.jobs.algorithms import idle_notes, try_algorithm
from rlinf.jobs.embodied.buffer_memory import demonstrated_in, size_of
from rlinf.jobs.training import optimizer_settings
from rlinf_algos import Algorithm, DaggerAlgorithm, OffPolicyAlgorithm
from rlinf_workers.models import LoraSettings
from rlinf_workers.plugins import POLICIES
from rlinf_workers.policies import LearnedSpaces, Needs, PolicySettings, SoftPolicy
from rlinf_workers.roles import (
    EmbodiedActorSettings,
    EpisodeBatch,
    ExpertQueries,
    OffPolicyActorSettings,
    OffPolicyRolloutSettings,
    transition_bytes,
)
from rlinf_workers.trainers import BackendSettings, OptimizerSettings


class Learning(ABC):
    """The parts of the job that depend on the kind of algorithm. Raises: UserError for a wrong custom part."""

    notes: tuple[str, ...] = ()
    """For the manifest."""

    @abstractmethod
    def check(self, policy: PolicySettings, needs: Needs, host_bytes: int) -> None:
        """Raises: UserError for a policy that the algorithm cannot train, or for buffers that do not fit.

        Args:
            host_bytes: memory of the machine.
        """

    keeps_demonstrations = False
    """Whether the actor keeps the demonstrations of an SFT warm-up."""

    def queries(self, needs: Needs) -> ExpertQueries | None:
        """What an expert is asked in training; None: nothing."""
        return None

    @abstractmethod
    def rollout(self, policy: PolicySettings, needs: Needs) -> tuple[Any, ...]:
        """The arguments of the rollout's constructor."""

    @abstractmethod
    def actor(
        self,
        policy: PolicySettings,
        needs: Needs,
        backend: BackendSettings,
        *,
        sft_warm_up: OptimizerSettings | None,
        lora: LoraSettings | None,
    ) -> Any:
        """The argument of the actor's constructor."""


def learning_of(config: EmbodiedConfig) -> Learning:
    """How a config learns."""
    from rlinf.jobs.embodied.dagger_learning import DaggerLearning  # which builds on this module

    algorithm = config.algorithm
    if isinstance(algorithm, DaggerAlgorithm):
        return DaggerLearning(config, algorithm)
    return OffPolicy(config, algorithm) if isinstance(algorithm, OffPolicyAlgorithm) else OnPolicy(config, algorithm)


def episode_batch(config: EmbodiedConfig) -> EpisodeBatch | None:
    """The whole episodes of a training step; None: a step is segments."""
    algorithm, num_episodes = config.algorithm, config.env.episodes_per_step
    if num_episodes is None:
        return None
    assert isinstance(algorithm, Algorithm), "checked by the config"
    return EpisodeBatch(
        num_episodes=num_episodes,
        group_size=algorithm.group_size,
        num_shards=config.actor.num_shards,
        dynamic_sampling=algorithm.dynamic_sampling,
        oversampling=algorithm.oversampling,
    )


class OnPolicy(Learning):
    """Advantages of segments or whole episodes, and a clipped policy loss."""

    def __init__(self, config: EmbodiedConfig, algorithm: Algorithm) -> None:
        self._config, self._algorithm = config, algorithm
        try_algorithm(algorithm)
        self.notes = idle_notes(algorithm)

    def check(self, policy: PolicySettings, needs: Needs, host_bytes: int) -> None:
        if is_soft(policy):
            raise UserError(
                f"policy.name={policy.name} is trained by off-policy algorithms: algorithm.name="
                f"{self._algorithm.name} needs values and probabilities of the actions that were taken",
                hint="use --policy.name auto, or --algorithm.name sac",
            )
        self._check_values(policy.name, needs)

    def _check_values(self, name: str, needs: Needs) -> None:
        """Values belong to what is rewarded: chunks, or actions."""
        algorithm, of_actions = self._algorithm, needs.values_of_actions
        if not algorithm.has_critic or of_actions == (algorithm.reward_level == "action"):
            return
        has, other = ("each action", "action") if of_actions else ("a chunk", "chunk")
        raise UserError(
            f"algorithm.reward_level={algorithm.reward_level}: policy.name={name} has a value of {has}",
            hint=f"use --algorithm.reward_level {other}, an option of the policy if it has one for this, or an "
            "advantage without values",
        )

    def rollout(self, policy: PolicySettings, needs: Needs) -> tuple[Any, ...]:
        batch = episode_batch(self._config)
        return (policy,) if batch is None else (policy, self._config.env.num_groups, batch.group_size)

    def actor(
        self,
        policy: PolicySettings,
        needs: Needs,
        backend: BackendSettings,
        *,
        sft_warm_up: OptimizerSettings | None,
        lora: LoraSettings | None,
    ) -> EmbodiedActorSettings:
        return EmbodiedActorSettings(
            policy=policy,
            algorithm=self._algorithm,
            backend=backend,
            optimizer=optimizer_settings(self._config.actor),
            sft_warm_up=sft_warm_up,
            episodes=episode_batch(self._config),
            micro_batch_size=self._config.actor.micro_batch_size,
            lora=lora,
        )


class OffPolicy(Learning):
    """Critics of actions, and a policy that maximizes them, from replay buffers."""

    def __init__(self, config: EmbodiedConfig, algorithm: OffPolicyAlgorithm) -> None:
        self._config, self._algorithm = config, algorithm

    def check(self, policy: PolicySettings, needs: Needs, host_bytes: int) -> None:
        if not is_soft(policy):
            trainable = ", ".join(spec.name for spec in POLICIES.specs() if spec.off_policy)
            raise UserError(
                f"policy.name={policy.name} has no critics of actions, which algorithm.name={self._algorithm.name} "
                "trains",
                hint=f"use {trainable}, auto, or a custom rlinf_workers.policies.SoftPolicy",
            )
        policy_class: type[SoftPolicy] = POLICIES.get(policy.name)
        if self._config.demonstrations is not None and not policy_class.takes_demonstrations:
            raise UserError(
                f"demonstrations: policy.name={policy.name} does not learn the actions that they have",
                hint="leave the section out, and use --algorithm.name sac",
            )
        spaces = policy_class.learned_spaces(policy.fields, policy.actions, **policy.options)
        self._check_buffers(spaces, needs.chunk_size, host_bytes)

    def _check_buffers(self, spaces: LearnedSpaces, chunk_size: int, host_bytes: int) -> None:
        """Counts the memory of the replay buffers when they are fullest, and of demonstrations, and notes it."""
        env, num_numbers = self._config.env, spaces.actions.low.numel()
        num_stored = min(self._algorithm.buffer_size, self._config.run.num_steps * self._config.num_samples(chunk_size))
        ends_share = min(1.0, chunk_size / env.num_steps + chunk_size / env.max_episode_steps)
        row_bytes = transition_bytes(spaces.fields, num_numbers, ends_share=ends_share)
        # No transition begins where the one before has ended if shards take them in turn, or each is a chunk.
        are_apart = self._config.actor.num_shards > 1 or chunk_size > 1
        demonstrated = demonstrated_in(
            self._config, transition_bytes(spaces.fields, num_numbers, ends_share=float(are_apart))
        )
        size = (
            f"{num_stored:,} transitions of {row_bytes:,} bytes, {size_of(num_stored * row_bytes)}{demonstrated.text}"
        )
        left_bytes = host_bytes - demonstrated.num_bytes
        if num_stored * row_bytes > left_bytes:
            smaller = f"use --algorithm.buffer_size {int(0.5 * left_bytes / row_bytes)} at most, which is half of it"
            raise UserError(
                f"algorithm.buffer_size={self._algorithm.buffer_size}: the replay buffers grow to {size}, and this "
                f"machine has {size_of(host_bytes)}",
                hint=smaller if left_bytes > 0 else "use a smaller --demonstrations.num_episodes",
            )
        self.notes = (f"replay buffers: up to {size} of the actor's host memory",)

    def rollout(self, policy: PolicySettings, needs: Needs) -> tuple[Any, ...]:
        num_transitions = self._config.num_samples(needs.chunk_size)
        settings = OffPolicyRolloutSettings(
            policy=policy,
            num_random_steps=-(-self._algorithm.num_random // num_transitions),
        )
        return (settings,)

    def actor(
        self,
        policy: PolicySettings,
        needs: Needs,
        backend: BackendSettings,
        *,
        sft_warm_up: OptimizerSettings | None,
        lora: LoraSettings | None,
    ) -> OffPolicyActorSettings:
        assert sft_warm_up is None and lora is None, "checked by the config, and with the policy"
        actor = self._config.actor
        optimizer = replace(optimizer_settings(actor), value_learning_rate=None)
        critic_learning_rate = actor.value_learning_rate or actor.learning_rate
        return OffPolicyActorSettings(
            policy=policy,
            algorithm=self._algorithm,
            backend=backend,
            optimizer=optimizer,
            critic_optimizer=replace(optimizer, learning_rate=critic_learning_rate),
            num_updates=self._algorithm.num_updates(self._config.num_samples(needs.chunk_size)),
            micro_batch_size=actor.micro_batch_size,
        )


def is_soft(policy: PolicySettings) -> bool:
    policy_class = POLICIES.get(policy.name)
    return isinstance(policy_class, type) and issubclass(policy_class, SoftPolicy)
