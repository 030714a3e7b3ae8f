"""The section `algorithm` of the reasoning job: a name chooses a preset, and every field may be changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf.config.base import CROSS_CHECK, Conflict, Section
from rlinf_algos.algorithm import Algorithm, filled, problems
from rlinf_algos.errors import AlgosError
from rlinf_algos.parts import advantage_takes

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length_mean"]


class AlgorithmConfig(Section):
    """How rewards become an update. What a recipe leaves out comes from the preset; null: the algorithm has no such
    number."""

    name: str = Field(
        default="grpo",
        min_length=1,
        description="ppo, grpo, dr_grpo, dapo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gspo, cispo, "
        "gmpo, gdpo (with a weighted reward), distillation (with reference.path), or package.module:NAME of one of "
        "your own.",
    )
    group_size: int = Field(
        default=8, ge=1, description="Completions sampled for each prompt; most algorithms compare them."
    )
    advantage: str = Field(
        default="grpo",
        description="grpo, rloo, opo, gdpo (with a weighted reward), gae (with a critic), returns, or "
        "package.module:function.",
    )
    normalize_std: bool | None = Field(
        default=None, description="Divide advantages by the standard deviation of the group's rewards."
    )
    gamma: float | None = Field(default=None, ge=0, le=1, description="Discount of a reward one token later.")
    gae_lambda: float | None = Field(default=None, ge=0, le=1, description="Weight of longer returns in the advantage.")
    whiten_advantages: bool = Field(
        default=False, description="Bring the advantages of a step to mean 0 and deviation 1, over all its tokens."
    )
    policy_loss: str = Field(
        default="ppo_clip",
        description="ppo_clip, gspo, gmpo, cispo, sapo, clip_cov, kl_cov, decoupled, policy_gradient, or "
        "package.module:function.",
    )
    clip_low: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="The probability ratio is clipped below at 1 - clip_low; gmpo: its logarithm at -clip_low.",
    )
    clip_high: float | None = Field(
        default=None,
        ge=0,
        description="The probability ratio is clipped above at 1 + clip_high; gmpo: its logarithm at clip_high.",
    )
    dual_clip: float | None = Field(
        default=None, gt=1, description="Bound of the ratio where the advantage is negative; null: none."
    )
    weight_cap: float | None = Field(
        default=None, ge=1, description="Tokens that the engine and the actor find so differently likely are dropped."
    )
    correction: Literal["truncated", "masked", "rejected", "icepop"] | None = Field(
        default=None, description="What is done about tokens that the engine and the actor find differently likely."
    )
    correction_level: Literal["token", "sequence", "geometric"] | None = Field(
        default=None,
        description="Whose ratio counts: a token's, a completion's, or the geometric mean over a completion.",
    )
    correction_low: float | None = Field(
        default=None, ge=0, le=1, description="Tokens whose ratio, actor over engine, is lower are left out."
    )
    correction_high: float | None = Field(
        default=None, ge=1, description="Tokens whose ratio is higher are left out; truncated: the largest weight."
    )
    off_policy_threshold: float | None = Field(
        default=None,
        ge=0,
        description="Completions of a negative advantage that drifted by more nats a token from the policy that "
        "sampled them are left out; null: none is.",
    )
    top_entropy_fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of a micro-batch's tokens, those of the highest entropy, that the policy loss is of.",
    )
    aggregation: Aggregation = Field(default="token_mean", description="From the losses of tokens to one number.")
    kl: str = Field(default="k3", description="Estimate of the KL to the reference: k1, k2, k3, abs, k1+, k3+.")
    kl_coef: float = Field(
        default=0.0, ge=0, description="Weight of the KL to the reference model; 0 leaves the reference worker out."
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="Whether the KL is a term of the loss or a penalty on the rewards."
    )
    kl_clamp: float | None = Field(
        default=None, gt=0, description="Largest value of a token's k3; null: no bound. verl: 10."
    )
    kl_target: float | None = Field(
        default=None,
        gt=0,
        description="Adapt kl_coef after each step so that the KL of a completion, in nats, comes to this; needs "
        "kl_in=reward. null: it stays.",
    )
    kl_horizon: int | None = Field(
        default=None, ge=1, description="Completions in which an adapted kl_coef may change by a fifth."
    )
    reward_coef: float = Field(
        default=1.0, ge=0, description="Weight of the reward beside a KL in it; 0: the KL alone teaches."
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    value_loss: Literal["clipped", "huber"] | None = Field(default=None, description="Loss of the critic.")
    value_clip: float | None = Field(
        default=None, ge=0, description="How far a value may move in an update; null: as far as it likes."
    )
    huber_delta: float | None = Field(
        default=None, gt=0, description="Error from which on the critic's loss is linear."
    )
    dynamic_sampling: bool = Field(
        default=False, description="Leave groups whose rewards are all equal out of the update and its totals."
    )
    oversampling: float = Field(
        default=1.0,
        ge=1,
        description="With dynamic_sampling: times rollout.num_prompts that are sampled; the first with a signal train.",
    )
    overlong_buffer_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens before rollout.max_new_tokens within which the reward falls; 0: no penalty.",
    )
    overlong_penalty: float | None = Field(
        default=None, ge=0, description="How much the reward of a completion that reaches the limit falls."
    )
    overlong_filter: bool = Field(
        default=False,
        description="Leave completions that were cut at rollout.max_new_tokens out of the update and its totals.",
    )
    num_minibatches: int = Field(
        default=1, ge=1, description="Optimizer steps on the prompts of one step; divides rollout.num_prompts."
    )
    num_epochs: int = Field(default=1, ge=1, description="Passes over the prompts of one step.")
    options: dict[str, bool | int | float | str | None] = Field(
        default={}, description="Further arguments of an advantage or a policy loss of your own."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """What is left out, from the preset."""
        if not isinstance(values, dict) or not isinstance(values.get("name", "grpo"), str):
            return values
        name = values.get("name", "grpo")
        try:
            made = filled(name, values)
        except AlgosError as error:
            conflict = Conflict(keys=("algorithm.name",), text=f"={name}: {error}")
            raise PydanticCustomError(
                CROSS_CHECK, "{text}", {"text": str(conflict), "conflicts": [conflict]}
            ) from error
        return made | values

    def conflicts(self) -> Iterator[Conflict]:
        for key, text in problems(self.model_dump()):
            yield Conflict(keys=(f"algorithm.{key}", "algorithm.name"), text=text)

    @property
    def reads_parts(self) -> bool:
        """Whether the advantage reads the parts of a weighted reward."""
        return "parts" in advantage_takes(self.advantage).inputs

    def to_algorithm(self) -> Algorithm:
        """The same for `rlinf_algos`."""
        return Algorithm(**self.model_dump())
