"""Config of the embodied job: a robot learns a task in simulation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlinf.config.algorithm import EpisodesAlgorithm
from rlinf.config.base import Conflict, Section, not_multiple
from rlinf.config.common import JobConfig, TrainerConfig
from rlinf_algos.algorithm import preset

EVAL_SEED_LIMIT = 2**31
"""Training resets with seeds from here on, evaluation below, so that the two never meet."""


class EnvConfig(Section):
    """The environments, their number, and what they are evaluated on."""

    kind: Literal["maniskill", "metaworld", "gymnasium", "import"] = Field(
        description="Where id is looked up; import: id is `package.module:callable` of an environment of your own."
    )
    id: str = Field(min_length=1, description="The environment, PushCube-v1 for example.")
    num_envs: int = Field(
        default=8, ge=1, description="Environments that are simulated side by side; a multiple of num_groups."
    )
    num_groups: int = Field(
        default=4, ge=1, description="Groups that travel together: while one waits for actions, another is simulated."
    )
    num_steps: int = Field(default=50, ge=1, description="Actions of each environment in one training step.")
    max_episode_steps: int = Field(default=50, ge=1, description="Actions after which an episode is cut off.")
    ignore_terminations: bool = Field(
        default=False,
        description="Training episodes go on after success or failure until they are cut off, as those of an "
        "evaluation always do, so that the policy learns to stay successful.",
    )
    options: dict[str, bool | int | float | str | Annotated[tuple[str, ...], Field(strict=False)] | None] = Field(
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
        default="actor_critic",
        min_length=1,
        description="actor_critic, cnn, openvla, pi0, or package.module:Class of one of your own.",
    )
    options: dict[str, bool | int | float | str | None] = Field(
        default={}, description="Every policy but actor_critic: arguments for its constructor."
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


class PolicyActorConfig(TrainerConfig):
    """The optimizer (Adam, as long as there is no weight decay) and how a batch is cut."""

    max_grad_norm: float = Field(default=0.5, gt=0, description="Gradients with a larger norm are scaled down to it.")
    num_shards: int = Field(
        default=2,
        ge=1,
        description="Parts of a batch with a sum of their own, so that numbers do not depend on the number of ranks.",
    )


class EmbodiedConfig(JobConfig):
    """A robot learns a task in simulation."""

    job: Literal["embodied"] = Field(description="Which training program runs.")
    env: EnvConfig = Field(description="The environments.")
    policy: PolicyConfig = Field(default=PolicyConfig(), description="The network.")
    algorithm: EpisodesAlgorithm = Field(
        default=preset("ppo", samples="episodes"), description="The learning algorithm."
    )
    actor: PolicyActorConfig = Field(default=PolicyActorConfig(), description="The optimizer and how a batch is cut.")

    @property
    def roles(self) -> tuple[str, ...]:
        return ("env", "policy", "actor")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.actor.backend == "megatron":
            yield Conflict(
                keys=("actor.backend",), text="=megatron holds language models alone; use replicated or fsdp2"
            )
        yield from not_multiple("env.num_envs", self.env.num_envs, "env.num_groups", self.env.num_groups)
        shards = ("actor.num_shards", self.actor.num_shards)
        yield from not_multiple("env.num_groups", self.env.num_groups, *shards)
        if text := self.minibatch_conflict():
            keys = ("algorithm.num_minibatches", "env.num_steps", "env.num_envs", "actor.num_shards")
            yield Conflict(keys=keys, text=text)
        if not self.algorithm.has_critic:
            yield from self._group_conflicts()
        last = self.env.eval_seed + self.env.num_eval_episodes
        if last > EVAL_SEED_LIMIT:
            yield Conflict(
                keys=("env.eval_seed", "env.num_eval_episodes"),
                text=f"={self.env.eval_seed} + env.num_eval_episodes={self.env.num_eval_episodes} exceeds 2**31, where "
                "the seeds of training begin; use a smaller seed",
            )
        yield from self._cut_conflicts(self.actor.backend)
        yield from self._shard_conflicts(self.actor.num_shards)

    def minibatch_conflict(self, chunk_size: int = 1) -> str | None:
        """What is wrong with `algorithm.num_minibatches` where a policy answers so many actions at once: a sample is an
        answer, and every shard's samples are cut into minibatches."""
        num_samples, shards = self.env.num_envs * self.env.num_steps // chunk_size, self.actor.num_shards
        wanted, size = self.algorithm.num_minibatches, max(1, num_samples // shards)
        if num_samples % (wanted * shards) == 0:
            return None
        nearest = sorted((n for n in range(1, size + 1) if size % n == 0), key=lambda n: (abs(n - wanted), n))[:2]
        made_of = "env.num_envs * env.num_steps" + (f" / {chunk_size}" if chunk_size > 1 else "")
        return (
            f"={wanted} does not cut the {made_of} = {num_samples} samples of a step, in actor.num_shards={shards} "
            f"shards, into equal minibatches; use {' or '.join(map(str, sorted(nearest)))}"
        )

    def _group_conflicts(self) -> Iterator[Conflict]:
        """Without values, the environments of a group are compared: whole episodes from one start."""
        num_envs, num_groups = self.env.num_envs, self.env.num_groups
        if num_envs < 2 * num_groups:
            yield Conflict(
                keys=("env.num_envs", "env.num_groups", "algorithm.advantage", "algorithm.name"),
                text=f"={num_envs} leaves {num_envs // num_groups} environment in each of env.num_groups={num_groups}, "
                f"and algorithm.advantage={self.algorithm.advantage} compares those of a group; use at least "
                f"{2 * num_groups}, better {8 * num_groups}",
            )
        num_steps, limit = self.env.num_steps, self.env.max_episode_steps
        if num_steps != limit:
            yield Conflict(
                keys=("env.num_steps", "env.max_episode_steps", "algorithm.advantage", "algorithm.name"),
                text=f"={num_steps} differs from env.max_episode_steps={limit}, and algorithm.advantage="
                f"{self.algorithm.advantage} compares whole episodes; use {limit}",
            )
