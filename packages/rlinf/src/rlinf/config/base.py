"""Base class of config sections: strict validation, and cross-checks that name their keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from rlinf.hub import hub_name, known_dataset
from rlinf_workers.plugins import Plugins, Spec

S = TypeVar("S", bound=Spec)

CROSS_CHECK = "cross_check"
"""Type of the pydantic error that carries `Conflict`s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """Values that contradict each other.

    Example: Conflict(keys=("env.num_envs", "env.num_groups"), text="=8 is not a multiple of env.num_groups=3; use 6 or
        9")
    """

    keys: tuple[str, ...]
    """Dotted keys from the root of the config; the message begins with the first."""
    text: str
    """Follows the first key: its value, what is wrong, what to do."""

    def __str__(self) -> str:
        return f"{self.keys[0]}{self.text}"


class Section(BaseModel):
    """A section of a config: unknown keys are errors, values are not coerced, and validated sections are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    HUB_USE: ClassVar[Literal["model", "rows", "folder"]] = "model"
    """What the names on the Hub in this section are of: models, or data sets that are read row by row, or as the folder
    that they are."""

    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about how this config is written: keys under an old name."""
        return self._notes

    def with_notes(self, notes: Sequence[str]) -> Self:
        """Returns a copy with these notes."""
        copy = self.model_copy()
        copy._notes = tuple(notes)  # pyright: ignore[reportPrivateUsage]
        return copy

    def conflicts(self) -> Iterator[Conflict]:
        """Yields all contradictions between values of this section. Called once every single value is valid."""
        yield from ()

    @model_validator(mode="after")
    def _cross_check(self) -> Self:
        conflicts = list(self.conflicts())
        if conflicts:
            text = "\n".join(map(str, conflicts))
            raise PydanticCustomError(CROSS_CHECK, "{text}", {"text": text, "conflicts": conflicts})
        return self


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))


def _absolute_or_public(path: Path) -> Path:
    return path if hub_name(path) else _absolute(path)


InputPath = Annotated[Path, Field(strict=False), AfterValidator(_absolute)]
"""A path, relative to the folder where the command runs; absolute once loaded, so that a run can be resumed from
elsewhere."""

ModelPath = Annotated[Path, Field(strict=False), AfterValidator(_absolute_or_public)]
"""A model's folder, or its name on the Hugging Face Hub, ORG/NAME[@REVISION], as a path that is not absolute. The
commands replace such a name by the folder of its snapshot before they check anything (`rlinf.config.downloads`)."""
DataPath = Annotated[
    Path, Field(strict=False), AfterValidator(lambda path: known_dataset(path) or _absolute_or_public(path))
]
"""A data file or folder, or the name of a data set on the Hub, ORG/NAME[@REVISION][:SUBSET][[SPLIT]] or a short one."""

Seed = Annotated[int, Field(ge=0, le=2**23 - 1)]
"""Below 2**23, so that seed, step and rank fit together into the 64 bits of a generator's seed."""


def _strings(value: Any) -> Any:
    """Turns a single string into a tuple: `</answer>` means `[</answer>]`."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_strings)]
"""Texts; a single one may stand without brackets."""
Options = dict[str, bool | int | float | str | Annotated[tuple[str | int, ...], Field(strict=False)] | None]
"""Arguments of the constructor of an environment or a policy."""


def neighbours(value: int, step: int) -> str:
    """Returns the multiples of `step` around `value`, for an error message: neighbours(8, 3) = "6 or 9"."""
    below, above = value // step * step, (value // step + 1) * step
    return f"{below} or {above}" if below > 0 else str(above)


def either(plugins: Plugins[S], is_fit: Callable[[S], bool]) -> str:
    """Returns the shipped plug-ins for which `is_fit` is true, for an error message: "fsdp2 or replicated"."""
    return " or ".join(spec.name for spec in plugins.specs() if is_fit(spec))


def not_multiple(key: str, value: int, by: str, step: int) -> Iterator[Conflict]:
    """Yields a conflict if the value of `key` is not a multiple of `step`, the value of `by`."""
    if value % step:
        yield Conflict(keys=(key, by), text=f"={value} is not a multiple of {by}={step}; use {neighbours(value, step)}")
