"""Config of `rlinf eval --compare`: two robot policies on the same starts."""

from __future__ import annotations

from pydantic import Field

from rlinf.config.base import InputPath, Section
from rlinf.config.embodied import EVAL_SEED_LIMIT
from rlinf.config.playing import TrainedConfig

SIDES = ("a", "b")


class ComparedConfig(TrainedConfig):
    """One of the two policies, and the environments that it acts in."""

    checkpoint: InputPath | None = Field(
        default=None, description="The checkpoint with the policy. null: the published one of policy.options.folder."
    )


class CompareConfig(Section):
    """How the two policies are compared."""

    num_episodes: int = Field(default=100, ge=1, description="Episodes of each policy, on the same starts.")
    first_seed: int | None = Field(
        default=None,
        ge=0,
        lt=EVAL_SEED_LIMIT,
        description="Seed of the first episode; each further episode adds 1. null: env.eval_seed of the first policy.",
    )
    num_films: int = Field(
        default=12, ge=0, description="Flipped starts that are played again and filmed, both policies side by side."
    )
    one_by_one: bool | None = Field(
        default=None,
        description="The policy answers one environment at a time, so that its numbers depend on no batch: they are "
        "bitwise the same for any env.num_envs and env.num_groups. null: on CPU devices, where it costs little.",
    )
    force: bool = Field(default=False, description="Compare although the protocols differ.")


class ComparisonConfig(Section):
    """Everything that decides the numbers of a comparison."""

    a: ComparedConfig = Field(description="The first policy.")
    b: ComparedConfig = Field(description="The second policy.")
    compare: CompareConfig = Field(default=CompareConfig(), description="How they are compared.")
