"""Config of the embodied job: a robot learns a task in simulation by PPO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rlinf.config.base import Problem, Section, neighbours
from rlinf.config.common import JobConfig

EVAL_SEED_LIMIT = 2**31
"""Training resets with seeds from here on, evaluation below, so that the two never meet."""


class EnvConfig(Section):
    """The environments, their number, and what they are evaluated on."""

    kind: Literal["maniskill", "gymnasium", "import"] = Field(
        description="Where id is looked up; import: id is `package.module:callable` of an environment of your own."
    )
    id: str = Field(min_length=1, description="The environment, PushCube-v1 for example.")
    num_envs: int = Field(
        default=8, ge=1, description="Environments that are simulated side by side; a multiple of num_groups."
    )
    num_groups: int = Field(
        default=4, ge=1, description="Groups that travel together: while one waits for actions, another is simulated."
    )
    max_episode_steps: int = Field(default=50, ge=1, description="Actions after which an episode is cut off.")
    control_mode: str | None = Field(
        default=None, description="How actions drive the robot; null: the environment's own."
    )
    reward_mode: str | None = Field(default=None, description="Which reward the environment gives; null: its own.")
    options: dict[str, bool | int | float | str | None] = Field(
        default={}, description="More arguments for the environment's constructor."
    )
    num_eval_episodes: int = Field(default=100, ge=1, description="Episodes of an evaluation.")
    eval_seed: int = Field(
        default=50_000, ge=0, description="Reset seed of the first evaluation episode; the next ones count up."
    )


class PolicyConfig(Section):
    """Two towers over the state: policy and value."""

    hidden_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(128, 128, 128), min_length=1, description="Widths of the hidden layers."
    )
    activation: Literal["tanh"] = Field(default="tanh", description="Non-linearity between the layers.")
    initial_log_std: float = Field(
        default=-0.5, ge=-10, le=3, description="Logarithm of the action noise before the first step."
    )
    normalize_observations: bool = Field(
        default=True, description="Scale observations by their running mean and deviation."
    )


class PpoConfig(Section):
    """Proximal policy optimization (arXiv:1707.06347) with generalized advantage estimation."""

    name: Literal["ppo"] = Field(default="ppo", description="The algorithm.")
    num_steps: int = Field(default=50, ge=1, description="Actions of each environment in one training step.")
    gamma: float = Field(default=0.8, ge=0, le=1, description="Discount of a reward one step later.")
    gae_lambda: float = Field(default=0.9, ge=0, le=1, description="Weight of longer returns in the advantage.")
    clip: float = Field(
        default=0.2, gt=0, lt=1, description="The probability ratio is clipped to 1 - clip ... 1 + clip."
    )
    num_epochs: int = Field(default=8, ge=1, description="Passes over the samples of a step.")
    minibatch_size: int = Field(
        default=100,
        ge=1,
        description="Samples of an optimizer step; a multiple of actor.num_shards and a divisor of all samples.",
    )
    value_coef: float = Field(default=0.5, ge=0, description="Weight of the value loss.")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    target_kl: float | None = Field(
        default=0.1, gt=0, description="End the epochs once the KL to the sampling policy exceeds it; null for never."
    )
    bootstrap_at_termination: bool = Field(
        default=True,
        description="Count the value of the last state also where an episode ends in success, as if it went on.",
    )


class PolicyActorConfig(Section):
    """The optimizer (Adam) and how a batch is cut."""

    learning_rate: float = Field(default=3e-4, gt=0, description="Learning rate.")
    max_grad_norm: float = Field(default=0.5, gt=0, description="Gradients with a larger norm are scaled down to it.")
    num_shards: int = Field(
        default=2,
        ge=1,
        description="Parts of a batch with a sum of their own, so that numbers do not depend on the number of ranks.",
    )


class EmbodiedConfig(JobConfig):
    """A robot learns a task in simulation by PPO."""

    job: Literal["embodied"] = Field(description="Which training program runs.")
    env: EnvConfig = Field(description="The environments.")
    policy: PolicyConfig = Field(default=PolicyConfig(), description="The network.")
    algorithm: PpoConfig = Field(default=PpoConfig(), description="The learning algorithm.")
    actor: PolicyActorConfig = Field(default=PolicyActorConfig(), description="The optimizer and how a batch is cut.")

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from self._multiple("env.num_envs", self.env.num_envs, "env.num_groups", self.env.num_groups)
        shards = ("actor.num_shards", self.actor.num_shards)
        yield from self._multiple("env.num_groups", self.env.num_groups, *shards)
        yield from self._multiple("algorithm.minibatch_size", self.algorithm.minibatch_size, *shards)
        num_samples = self.env.num_envs * self.algorithm.num_steps
        if num_samples % self.algorithm.minibatch_size:
            yield Problem(
                keys=("algorithm.minibatch_size", "algorithm.num_steps", "env.num_envs"),
                text=f"={self.algorithm.minibatch_size} does not divide the env.num_envs * algorithm.num_steps = "
                f"{num_samples} samples of a step; use {self._nearest_divisors(num_samples)}",
            )
        last = self.env.eval_seed + self.env.num_eval_episodes
        if last > EVAL_SEED_LIMIT:
            yield Problem(
                keys=("env.eval_seed", "env.num_eval_episodes"),
                text=f"={self.env.eval_seed} + env.num_eval_episodes={self.env.num_eval_episodes} exceeds 2**31, where "
                "the seeds of training begin; use a smaller seed",
            )
        yield from self._shard_problems(self.actor.num_shards)

    @staticmethod
    def _multiple(key: str, value: int, by: str, step: int) -> Iterator[Problem]:
        if value % step:
            yield Problem(
                keys=(key, by), text=f"={value} is not a multiple of {by}={step}; use {neighbours(value, step)}"
            )

    def _nearest_divisors(self, total: int) -> str:
        size, shards = self.algorithm.minibatch_size, self.actor.num_shards
        fitting = [n for n in range(shards, total + 1, shards) if total % n == 0] or [total]
        return " or ".join(str(n) for n in sorted(sorted(fitting, key=lambda n: (abs(n - size), n))[:2]))
