"""Demonstration: the one record that every reader of demonstrations yields, whatever its source."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_envs.core.protocol import FieldSpec, Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """One episode, T actions long.

    Example: T = 2 actions of a robot that is shown to itself and told what to do:
        observations = {"state": [2, 4] float32, "image.front": [2, 64, 64, 3] uint8, "instruction": ["push", "push"]},
        actions = [2, 4] float32, rewards = [0.1, 1.0], success = True
    """

    task: str
    seed: int | None
    """The seed that its environment was reset with; None where nobody wrote it down."""
    observations: Observation
    """[T, ...]: the fields that were shown before each action, in the form of `BatchedEnv`; a text as T strings."""
    actions: Tensor
    """[T, *shape of an action] float32 or int64, as the environment takes them."""
    rewards: Tensor
    """[T] float32: what each action earned; zeros where the source has none."""
    success: bool
    """Whether the task counted as solved at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnvironment:
    """The environment that demonstrations are for, where files leave open what it would have shown of them."""

    fields: Mapping[str, FieldSpec] = field(default_factory=dict)
    """What one row of it shows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its options, as `EnvSpec.options`."""


class DemonstrationFiles(Sequence[Demonstration]):
    """The successful episodes of files, each read when it is asked for. A reader derives from it."""

    env_id: str | None = None
    """The environment that they were recorded in, by its kind's own name; None: the files do not say."""
    options: Mapping[str, str | bool] = MappingProxyType({})
    """Options of the environment that decide what actions and pictures mean, as far as the files say."""
    defaults: Mapping[str, str | bool] = MappingProxyType({})
    """What the environment takes for these options where they are not given."""

    def are_of(self, env_id: str, options: Mapping[str, Any]) -> bool:
        """Whether an environment of this id with these options has the task that they show, as far as the files say."""
        return self.env_id in (None, env_id)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.read(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"episode {index} of {len(self)}")
        return self.read(index % len(self))

    @abstractmethod
    def read(self, number: int) -> Demonstration:
        """Episode `number` of the successful ones, from 0 on. Raises: EnvError where files are damaged."""


def stacked(rows: Sequence[Mapping[str, np.ndarray | str]]) -> Observation:
    """The observations of T moments as those of a demonstration."""
    observation: Observation = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        observation[name] = [str(v) for v in values] if isinstance(first, str) else torch.from_numpy(np.stack(values))
    return observation
