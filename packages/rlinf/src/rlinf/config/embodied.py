"""Config of the embodied job: a robot learns a task in simulation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlinf.config.base import Conflict, Section, neighbours
from rlinf.config.common import BACKEND, BACKEND_OPTIONS, JobConfig

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
    ignore_terminations: bool = Field(
        default=False,
        description="Training episodes go on after success or failure until they are cut off, as those of an "
        "evaluation always do, so that the policy learns to stay successful.",
    )
    options: dict[str, bool | int | float | str | None] = Field(
        default={}, description="Arguments for the environment's constructor; ManiSkill's control_mode, for example."
    )
    num_eval_episodes: int = Field(default=100, ge=1, description="Episodes of an evaluation.")
    eval_seed: int = Field(
        default=50_000, ge=0, description="Reset seed of the first evaluation episode; the next ones count up."
    )


ACTOR_CRITIC: dict[str, Any] = {
    "hidden_sizes": (128, 128, 128),
    "initial_log_std": -0.5,
    "normalize_observations": True,
    "chunk_size": 1,
}
"""The keys of `policy` that are options of the shipped one, with their defaults."""


class PolicyConfig(Section):
    """The network that acts: two towers over the state, policy and value, or one of your own. null: the policy has no
    such option."""

    name: str = Field(
        default="actor_critic", min_length=1, description="actor_critic, or package.module:Class of one of your own."
    )
    options: dict[str, bool | int | float | str | None] = Field(
        default={}, description="A policy of your own: arguments for its constructor."
    )
    hidden_sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, description="actor_critic: widths of the hidden layers."
    )
    initial_log_std: float | None = Field(
        default=None,
        ge=-10,
        le=3,
        description="actor_critic, continuous actions: logarithm of their noise before the first step.",
    )
    normalize_observations: bool | None = Field(
        default=None, description="actor_critic: scale observations by their running mean and deviation."
    )
    chunk_size: int | None = Field(
        default=None, ge=1, description="actor_critic: actions that it answers at once, executed one after the other."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """What the shipped policy has and a recipe leaves out."""
        if isinstance(values, dict) and values.get("name", "actor_critic") == "actor_critic":
            return ACTOR_CRITIC | values
        return values

    def conflicts(self) -> Iterator[Conflict]:
        is_shipped = self.name == "actor_critic"
        if is_shipped and self.options:
            yield Conflict(
                keys=("policy.options", "policy.name"),
                text=f"={self.options} is not used: policy.name=actor_critic has {', '.join(ACTOR_CRITIC)} as keys of "
                "policy; leave it out",
            )
        for key in ACTOR_CRITIC:
            value = getattr(self, key)
            if is_shipped and value is None:
                yield Conflict(keys=(f"policy.{key}",), text=" is null; policy.name=actor_critic needs it")
            elif not is_shipped and value is not None:
                yield Conflict(
                    keys=(f"policy.{key}", "policy.name"),
                    text=f"={value} is not used: it belongs to policy.name=actor_critic; leave it out, or give it as "
                    f"policy.options.{key}",
                )

    @property
    def arguments(self) -> dict[str, Any]:
        """What the policy's constructor gets as keywords."""
        return {key: getattr(self, key) for key in ACTOR_CRITIC} if self.name == "actor_critic" else dict(self.options)


class EmbodiedAlgorithmConfig(Section):
    """PPO (arXiv:1707.06347) with generalized advantage estimation, or GRPO over episodes from the same start. null:
    the algorithm has no such number."""

    name: Literal["ppo", "grpo"] = Field(
        default="ppo",
        description="ppo: against a value function. grpo: against the other environments of the group, which all begin "
        "in the same state.",
    )
    num_steps: int = Field(default=50, ge=1, description="Actions of each environment in one training step.")
    gamma: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Discount of a reward one step later; grpo has it with compares=steps alone.",
    )
    gae_lambda: float | None = Field(
        default=None, ge=0, le=1, description="ppo: weight of longer returns in the advantage."
    )
    compares: Literal["episodes", "steps"] | None = Field(
        default=None,
        description="grpo: episodes by the sum of their rewards, or the rewards still to come at the same step.",
    )
    normalize_std: bool | None = Field(
        default=None, description="grpo: divide advantages by the standard deviation of the group."
    )
    clip: float = Field(
        default=0.2, gt=0, lt=1, description="The probability ratio is clipped to 1 - clip ... 1 + clip."
    )
    num_epochs: int = Field(default=8, ge=1, description="Passes over the samples of a step.")
    minibatch_size: int = Field(
        default=100,
        ge=1,
        description="Samples of an optimizer step; a multiple of actor.num_shards and a divisor of all samples.",
    )
    value_coef: float | None = Field(default=None, ge=0, description="ppo: weight of the value loss.")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    target_kl: float | None = Field(
        default=0.1, gt=0, description="End the epochs once the KL to the sampling policy exceeds it; null for never."
    )
    bootstrap_at_termination: bool | None = Field(
        default=None,
        description="ppo: count the value of the last state also where an episode ends in success, as if it went on.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """What the algorithm uses and a recipe leaves out."""
        if not isinstance(values, dict) or values.get("name", "ppo") not in OPTIONS:
            return values
        found = OPTIONS[values.get("name", "ppo")] | values
        return found if found.get("compares") == "episodes" else {"gamma": GAMMA} | found

    def conflicts(self) -> Iterator[Conflict]:
        mine = OPTIONS[self.name]
        sums_episodes = self.name == "grpo" and self.compares == "episodes"
        if sums_episodes and self.gamma is not None:
            yield Conflict(
                keys=("algorithm.gamma", "algorithm.compares"),
                text=f"={self.gamma} is not used: algorithm.compares=episodes adds the rewards up as they are; "
                "leave it out",
            )
        elif self.gamma is None and not sums_episodes:
            yield Conflict(keys=("algorithm.gamma",), text=f" is null; algorithm.name={self.name} needs it")
        for other, options in OPTIONS.items():
            for option in options:
                value = getattr(self, option)
                if option not in mine and value is not None:
                    yield Conflict(
                        keys=(f"algorithm.{option}", "algorithm.name"),
                        text=f"={value} is not used: it belongs to algorithm.name={other}, and this is {self.name}; "
                        "leave it out",
                    )
                elif option in mine and value is None:
                    yield Conflict(keys=(f"algorithm.{option}",), text=f" is null; algorithm.name={self.name} needs it")


GAMMA = 0.8
"""As ManiSkill's PPO baseline has it for its short tasks with dense rewards."""
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"gae_lambda": 0.9, "value_coef": 0.5, "bootstrap_at_termination": True},
    "grpo": {"compares": "episodes", "normalize_std": True},
}
"""Algorithm -> the keys that only it has, with their defaults."""


class PolicyActorConfig(Section):
    """The optimizer (Adam) and how a batch is cut."""

    learning_rate: float = Field(default=3e-4, gt=0, description="Learning rate.")
    max_grad_norm: float = Field(default=0.5, gt=0, description="Gradients with a larger norm are scaled down to it.")
    num_shards: int = Field(
        default=2,
        ge=1,
        description="Parts of a batch with a sum of their own, so that numbers do not depend on the number of ranks.",
    )
    backend: str = Field(default="replicated", min_length=1, description=BACKEND)
    backend_options: dict[str, bool | int | float | str] = Field(default={}, description=BACKEND_OPTIONS)


class EmbodiedConfig(JobConfig):
    """A robot learns a task in simulation."""

    job: Literal["embodied"] = Field(description="Which training program runs.")
    env: EnvConfig = Field(description="The environments.")
    policy: PolicyConfig = Field(default=PolicyConfig(), description="The network.")
    algorithm: EmbodiedAlgorithmConfig = Field(default=EmbodiedAlgorithmConfig(), description="The learning algorithm.")
    actor: PolicyActorConfig = Field(default=PolicyActorConfig(), description="The optimizer and how a batch is cut.")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        yield from self._multiple("env.num_envs", self.env.num_envs, "env.num_groups", self.env.num_groups)
        shards = ("actor.num_shards", self.actor.num_shards)
        yield from self._multiple("env.num_groups", self.env.num_groups, *shards)
        yield from self._multiple("algorithm.minibatch_size", self.algorithm.minibatch_size, *shards)
        num_samples = self.env.num_envs * self.algorithm.num_steps
        if num_samples % self.algorithm.minibatch_size:
            yield Conflict(
                keys=("algorithm.minibatch_size", "algorithm.num_steps", "env.num_envs"),
                text=f"={self.algorithm.minibatch_size} does not divide the env.num_envs * algorithm.num_steps = "
                f"{num_samples} samples of a step; use {self._nearest_divisors(num_samples)}",
            )
        if self.algorithm.name == "grpo":
            yield from self._group_conflicts()
        last = self.env.eval_seed + self.env.num_eval_episodes
        if last > EVAL_SEED_LIMIT:
            yield Conflict(
                keys=("env.eval_seed", "env.num_eval_episodes"),
                text=f"={self.env.eval_seed} + env.num_eval_episodes={self.env.num_eval_episodes} exceeds 2**31, where "
                "the seeds of training begin; use a smaller seed",
            )
        yield from self._shard_conflicts(self.actor.num_shards)

    def _group_conflicts(self) -> Iterator[Conflict]:
        """A group is whole episodes from one start."""
        num_envs, num_groups = self.env.num_envs, self.env.num_groups
        if num_envs < 2 * num_groups:
            yield Conflict(
                keys=("env.num_envs", "env.num_groups", "algorithm.name"),
                text=f"={num_envs} leaves {num_envs // num_groups} environment in each of env.num_groups={num_groups}, "
                f"and algorithm.name=grpo compares those of a group; use at least {2 * num_groups}, better "
                f"{8 * num_groups}",
            )
        num_steps, limit = self.algorithm.num_steps, self.env.max_episode_steps
        if num_steps != limit:
            yield Conflict(
                keys=("algorithm.num_steps", "env.max_episode_steps", "algorithm.name"),
                text=f"={num_steps} differs from env.max_episode_steps={limit}, and algorithm.name=grpo compares whole "
                f"episodes; use {limit}",
            )

    @staticmethod
    def _multiple(key: str, value: int, by: str, step: int) -> Iterator[Conflict]:
        if value % step:
            yield Conflict(
                keys=(key, by), text=f"={value} is not a multiple of {by}={step}; use {neighbours(value, step)}"
            )

    def _nearest_divisors(self, total: int) -> str:
        size, shards = self.algorithm.minibatch_size, self.actor.num_shards
        fitting = [n for n in range(shards, total + 1, shards) if total % n == 0] or [total]
        return " or ".join(str(n) for n in sorted(sorted(fitting, key=lambda n: (abs(n - size), n))[:2]))
