"""One row with one of several ManiSkill tasks at a time, chosen by the episode's seed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlinf_envs.adapters.maniskill.env import ManiSkillEnv
from rlinf_envs.adapters.maniskill.simulation import REWARD_MODE, ManiSkillSimulation, require_assets
from rlinf_envs.adapters.maniskill.tasks import instruction_of, registered_tasks
from rlinf_envs.core.protocol import FieldSpec
from rlinf_envs.core.vector import SingleObservation, SingleStep
from rlinf_envs.errors import EnvError


class ManiSkillSuite:
    """A `rlinf_envs.core.vector.SingleEnv` whose episode with seed s has task number s modulo their number.

    A task's environment is created when an episode first needs it, and kept; everything that can be checked without it
    is checked when the suite is created.
    """

    def __init__(self, tasks: Sequence[str], **options: Any) -> None:
        if options.get("state", "full") != "robot":
            raise EnvError(
                "the states of a suite's tasks differ in what they hold: use options.state=robot, and options.cameras "
                "for what else there is to see"
            )
        self._tasks = tuple(tasks)
        self._options = options
        for task in self._tasks:
            _check(task, options)
        option = options.get("instruction")
        self._envs: dict[str, ManiSkillEnv] = {}
        self._task = self._tasks[0]
        first = self._env()
        self.action_spec, self.notes = first.action_spec, first.notes
        self.observation_spec = _saying(first.observation_spec, [instruction_of(task, option) for task in self._tasks])

    @property
    def task(self) -> str:
        """The task of the current episode."""
        return self._task

    def reset(self, seed: int) -> None:
        self._task = self._tasks[seed % len(self._tasks)]
        self._env().reset(seed)

    def step(self, action: np.ndarray) -> SingleStep:
        return replace(self._env().step(action), task=self._task)

    def observe(self) -> SingleObservation:
        return self._env().observe()

    def render(self) -> np.ndarray:
        return self._env().render()

    def close(self) -> None:
        while self._envs:
            self._envs.popitem()[1].close()

    def _env(self) -> ManiSkillEnv:
        """The environment of the current task."""
        if self._task not in self._envs:
            env = ManiSkillEnv(self._task, **self._options)
            for first in list(self._envs.values())[:1]:
                same_actions = torch.equal(env.action_spec.low, first.action_spec.low)
                if not same_actions or _saying(env.observation_spec) != _saying(first.observation_spec):
                    env.close()
                    raise EnvError(
                        f"{self._task} shows or takes something else than {self._tasks[0]} with these options: "
                        f"{dict(env.observation_spec)}; choose others of the suite with options.tasks"
                    )
            self._envs[self._task] = env
        return self._envs[self._task]


def _check(task: str, options: Mapping[str, Any]) -> None:
    """Raises: EnvError for missing assets, an unsupported reward mode, and an option that the task's constructor does
    not take. Fast, unlike creating the task, which takes half a second or more."""
    registered = registered_tasks()[task]
    cls, others = registered.cls, "; choose others of the suite with options.tasks"
    require_assets(task, registered.asset_download_ids or [])
    rewards = dict.fromkeys((*cls.SUPPORTED_REWARD_MODES, "sparse"))
    if (mode := options.get("reward_mode", REWARD_MODE)) not in rewards:
        raise EnvError(f"options.reward_mode={mode!r}: {task} has {', '.join(rewards)}{others}")
    makers = (*cls.__mro__, ManiSkillEnv, ManiSkillSimulation)
    taken = {name for maker in makers for name in inspect.signature(maker.__init__).parameters}
    if unknown := sorted(options.keys() - taken):
        raise EnvError(f"{task} takes no option {', '.join(unknown)}{others}")


def _saying(fields: Mapping[str, FieldSpec], instructions: Sequence[str | None] = ()) -> dict[str, FieldSpec]:
    """Returns the fields with these instructions, if any, in place of one task's."""
    texts = tuple(dict.fromkeys(text for text in instructions if text is not None))
    return {name: replace(field, texts=texts) if field.dtype == "text" else field for name, field in fields.items()}
