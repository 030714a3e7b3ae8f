"""Searches for the nearest settings that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, TypeVar

from pydantic import BaseModel

from rlinf.config.common import JobConfig

Config = TypeVar("Config", bound=JobConfig)
MOST_KEYS = 3
"""Maximum number of keys that a suggestion changes."""
MOST_SHOWN = 4
Key = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyChange:
    """A different value for one key."""

    key: Key
    value: Any

    @property
    def text(self) -> str:
        """As on the command line."""
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"--{'.'.join(self.key)} {value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingChanges:
    """Changes with which a recipe fits."""

    changes: tuple[KeyChange, ...]
    needed_bytes: int

    @property
    def text(self) -> str:
        """The overrides and the memory that they need."""
        return f"{' '.join(change.text for change in self.changes)}: {self.needed_bytes / 2**30:.1f} GiB"


def fitting_changes(
    config: Config, axes: Sequence[Sequence[KeyChange]], fitting: Callable[[Config], int | None]
) -> list[FittingChanges]:
    """The first few changes that fit, with the fewest keys and the cheapest first.

    Args:
        axes: for each key the values to try, mild ones first; the keys in the order of their cost.
        fitting: the bytes that a config needs in the fullest place; None: it does not fit.
    """
    fits: list[FittingChanges] = []
    for num_keys in range(1, MOST_KEYS + 1):
        for chosen in combinations(axes, num_keys):
            keys = {axis[0].key for axis in chosen}
            if any(keys > {change.key for change in fit.changes} for fit in fits):
                continue  # fewer keys are enough
            for changes in product(*chosen):
                changed = _changed(config, changes)
                if changed is not None and (size := fitting(changed)) is not None:
                    fits.append(FittingChanges(changes=changes, needed_bytes=size))
                    break
        if fits:
            break
    return fits[:MOST_SHOWN]


def _changed(config: Config, changes: tuple[KeyChange, ...]) -> Config | None:
    """The config with the changes; None if they contradict it."""
    for change in changes:
        config = _with(config, change.key, change.value)
    return None if any(True for _ in config.conflicts()) else config


def _with(section: Any, key: Key, value: Any) -> Any:
    first, *rest = key
    if isinstance(section, dict):
        return {**section, first: value}
    changed = _with(getattr(section, first), tuple(rest), value) if rest else value
    update = {first: changed}
    return section.model_copy(update=update) if isinstance(section, BaseModel) else replace(section, **update)
