"""Config of `rlinf eval --suite`: evaluation of a robot policy under conditions it did not see in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rlinf.config.base import Conflict, InputPath, Options, Section
from rlinf.config.embodied import EVAL_SEED_LIMIT
from rlinf.config.playing import TrainedConfig

RESUMABLE = ("cluster", "venvs")
"""Keys that may change when an evaluation is resumed; they do not affect the numbers."""
SEEN = "seen"
"""The variant that every suite has: training conditions with evaluation seeds."""
AXES = ("vision", "semantics", "execution")
Axis = Literal["vision", "semantics", "execution"]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)]


def _names(value: Any) -> Any:
    """Turns command-line text into a tuple: `vision,execution` means `[vision, execution]`."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


class DisturbConfig(Section):
    """Disturbances of images and instructions; each is drawn with the episode's seed."""

    brightness: float = Field(default=0.0, ge=-1, le=1, description="-1: black images; 1: twice as bright.")
    texture: float = Field(
        default=0.0, ge=0, le=1, description="Share of random patches mixed into each image, new ones for each image."
    )
    noise: float = Field(default=0.0, ge=0, le=1, description="Share of random pixels mixed into each image.")
    shift: int = Field(default=0, ge=0, description="Maximum shift of an episode's images, in pixels.")
    wordings: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Alternative wordings, with {instruction} where the original goes; each episode uses one.",
    )
    paraphrases: dict[str, Names] = Field(
        default={},
        description="Instruction -> sentences of which each episode uses one in its place; applied before wordings.",
    )

    def conflicts(self) -> Iterator[Conflict]:
        for wording in self.wordings:
            if "{instruction}" not in wording:
                yield Conflict(
                    keys=("suite.variants", "suite"),
                    text=f": the wording {wording!r} lacks {{instruction}}, where the instruction goes",
                )


class VariantEnvConfig(Section):
    """Changes to the run's environment."""

    id: str | None = Field(default=None, min_length=1, description="Another environment of the run's kind.")
    max_episode_steps: int | None = Field(default=None, ge=1, description="Another time limit.")
    options: Options = Field(
        default={}, description="Options that replace the run's; options not listed stay the same."
    )


class VariantConfig(Section):
    """One condition that differs from training."""

    axis: Axis = Field(description="The ability tested: vision, semantics or execution.")
    about: str = Field(default="", description="Description of the difference.")
    env: VariantEnvConfig = Field(default=VariantEnvConfig(), description="The environment.")
    disturb: DisturbConfig = Field(default=DisturbConfig(), description="Images and instructions.")
    first_seed: int | None = Field(default=None, ge=0, lt=EVAL_SEED_LIMIT, description="null: the suite's.")


class SuiteConfig(Section):
    """Variants of an environment, each evaluated with the same number of episodes and compared with `seen`."""

    name: str = Field(min_length=1, description="Name of the suite.")
    env_kind: str | None = Field(default=None, description="The env.kind that the suite is for; null: any.")
    num_episodes: int = Field(default=50, ge=1, description="Episodes of each variant.")
    first_seed: int | None = Field(
        default=None,
        ge=0,
        lt=EVAL_SEED_LIMIT,
        description="Seed of a variant's first episode; each further episode adds 1. null: env.eval_seed of the run.",
    )
    num_films: int = Field(default=2, ge=0, description="Episodes of each variant that are recorded (rlinf[video]).")
    variants: dict[str, VariantConfig] = Field(min_length=1, description="Name -> what differs from training.")

    def conflicts(self) -> Iterator[Conflict]:
        if SEEN in self.variants:
            yield Conflict(keys=("suite.variants.seen",), text=" is there in every suite; leave it out")


class SuiteEvalConfig(TrainedConfig):
    """Everything that decides the numbers of a suite evaluation."""

    checkpoint: InputPath | None = Field(
        default=None,
        description="The checkpoint with the policy to evaluate. null: the published one of policy.options.folder.",
    )
    suite: SuiteConfig = Field(description="The suite.")
    only: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_names)] = Field(
        default=(), strict=False, description="Axes and variants to evaluate, besides seen; empty: all."
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        allowed = (*AXES, *self.suite.variants)
        for name in self.only:
            if name not in allowed:
                yield Conflict(keys=("only",), text=f": {name!r} is none of {', '.join(allowed)}")
        if self.suite.env_kind not in (None, self.env.kind):
            yield Conflict(
                keys=("suite.env_kind", "suite"),
                text=f"={self.suite.env_kind}, and the policy acts in env.kind={self.env.kind}; choose a suite of this "
                "kind, or write one",
            )

    @property
    def chosen(self) -> dict[str, VariantConfig]:
        """The variants to evaluate, besides `seen`."""
        names = set(self.only)
        return {
            name: variant for name, variant in self.suite.variants.items() if not names or names & {name, variant.axis}
        }
