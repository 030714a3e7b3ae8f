"""Config of `rlinf eval --suite`: how a robot policy is asked for what it did not see in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rlinf.config.base import Conflict, InputPath, Section
from rlinf.config.embodied import EVAL_SEED_LIMIT
from rlinf.config.playing import TrainedConfig

RESUMABLE = ("cluster", "venvs")
"""Keys that may change when an evaluation is resumed: they move no number."""
SEEN = "seen"
"""The variant that every suite has: as in training, with the seeds of evaluations."""
AXES = ("vision", "semantics", "execution")
Axis = Literal["vision", "semantics", "execution"]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)]


def _names(value: Any) -> Any:
    """`vision,execution` for `[vision, execution]`."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


class DisturbConfig(Section):
    """What becomes of pictures and instructions; each draw belongs to the seed of the episode."""

    brightness: float = Field(default=0.0, ge=-1, le=1, description="-1: black pictures; 1: twice as bright.")
    texture: float = Field(
        default=0.0, ge=0, le=1, description="Share of random patches mixed into each picture, drawn anew for each."
    )
    noise: float = Field(default=0.0, ge=0, le=1, description="Share of random pixels mixed into each picture.")
    shift: int = Field(default=0, ge=0, description="Pixels by which the pictures of an episode are moved, at most.")
    wordings: tuple[str, ...] = Field(
        default=(), strict=False, description="Other words, with {instruction} where its own go; an episode has one."
    )
    paraphrases: dict[str, Names] = Field(
        default={}, description="Instruction -> sentences of which an episode has one in its place; before wordings."
    )

    def conflicts(self) -> Iterator[Conflict]:
        for wording in self.wordings:
            if "{instruction}" not in wording:
                yield Conflict(
                    keys=("suite.variants", "suite"),
                    text=f": the wording {wording!r} lacks {{instruction}}, where the instruction goes",
                )


class VariantEnvConfig(Section):
    """What is other than in the run's environment."""

    id: str | None = Field(default=None, min_length=1, description="Another environment of the run's kind.")
    max_episode_steps: int | None = Field(default=None, ge=1, description="Another time limit.")
    options: dict[str, bool | int | float | str | Annotated[tuple[str | int, ...], Field(strict=False)] | None] = Field(
        default={}, description="Options in place of the run's; those that are not named stay."
    )


class VariantConfig(Section):
    """One way in which things are not as in training."""

    axis: Axis = Field(description="What it asks of the policy: vision, semantics or execution.")
    about: str = Field(default="", description="What is other, in words.")
    env: VariantEnvConfig = Field(default=VariantEnvConfig(), description="The environment.")
    disturb: DisturbConfig = Field(default=DisturbConfig(), description="Pictures and instructions.")
    first_seed: int | None = Field(default=None, ge=0, lt=EVAL_SEED_LIMIT, description="null: the suite's.")


class SuiteConfig(Section):
    """Variants of an environment, each evaluated with the same number of episodes and compared with `seen`."""

    name: str = Field(min_length=1, description="Name of the suite.")
    env_kind: str | None = Field(default=None, description="Which env.kind it is for; null: any.")
    num_episodes: int = Field(default=50, ge=1, description="Episodes of each variant.")
    first_seed: int | None = Field(
        default=None,
        ge=0,
        lt=EVAL_SEED_LIMIT,
        description="Seed of a variant's first episode, the next ones count up; null: env.eval_seed of the run.",
    )
    num_films: int = Field(default=2, ge=0, description="Episodes of each variant that are filmed (rlinf[video]).")
    variants: dict[str, VariantConfig] = Field(min_length=1, description="Name -> what is other.")

    def conflicts(self) -> Iterator[Conflict]:
        if SEEN in self.variants:
            yield Conflict(keys=("suite.variants.seen",), text=" is there in every suite; leave it out")


class SuiteEvalConfig(TrainedConfig):
    """Everything that decides the numbers of an evaluation by a suite."""

    checkpoint: InputPath = Field(description="The checkpoint whose policy acts.")
    suite: SuiteConfig = Field(description="The suite.")
    only: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_names)] = Field(
        default=(), strict=False, description="Axes and variants that are asked, beside seen; empty: all."
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
        """The variants that are asked, beside `seen`."""
        names = set(self.only)
        return {
            name: variant for name, variant in self.suite.variants.items() if not names or names & {name, variant.axis}
        }
