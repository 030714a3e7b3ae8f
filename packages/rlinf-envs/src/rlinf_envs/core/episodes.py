"""Shared by the vectors of this package: bookkeeping of running episodes, and watchers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rlinf_envs.core.protocol import EpisodeEnd
from rlinf_envs.core.seeding import episode_seed
from rlinf_envs.errors import EnvError


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One row right after its reset or after an action; passed to watchers."""

    env_index: int
    episode_index: int
    seed: int
    """The episode's seed."""
    num_actions: int
    """Actions of the episode so far; 0 right after the reset."""
    success: bool | None = None
    """Whether the task counts as solved now; None right after the reset, or if the environment does not define it."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """What the reward of the last action consists of, as far as the environment reports it."""
    is_past_end: bool = False
    """The episode had ended before this action, and the environment does not define such steps."""


class Watchable(ABC):
    """A vector in this process that can be watched while it executes a chunk. A base class and no protocol, because
    wrappers that forward every attribute are not watchable."""

    _watcher: Callable[[Moment], None] | None = None
    _ends_for_good: bool = False
    """Steps after `terminated` are undefined."""

    def watch(self, watcher: Callable[[Moment], None] | None) -> None:
        """Calls `watcher` after every reset and every action of a row, also within `step_chunk` and at an episode's
        last action, while `render_row` still shows that moment. None removes the watcher."""
        self._watcher = watcher

    def _tell_watcher(self, index: int, row: RunningEpisode) -> None:
        if self._watcher is not None:
            self._watcher(row.moment(index, ends_for_good=self._ends_for_good))

    @abstractmethod
    def render_row(self, env_index: int) -> np.ndarray:
        """Renders one row as [H, W, 3] uint8."""


@dataclass(slots=True)
class RunningEpisode:
    """The current episode of a row."""

    row_seed: int
    """Seed of the row's last `reset`."""
    episode_index: int
    num_actions: int = 0
    return_: float = 0.0
    success_once: bool | None = None
    success: bool | None = None
    task: str | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Of the last action."""
    ended_at: int | None = None
    """Actions after which the environment reported termination; more follow if terminations are ignored."""

    @property
    def seed(self) -> int:
        """The episode's seed."""
        return episode_seed(self.row_seed, self.episode_index)

    def add(self, reward: float, success: bool | None, task: str | None = None) -> None:
        """Adds one action. `success`: whether the task counts as solved now; None if unknown."""
        self.num_actions += 1
        self.return_ += reward
        self.success = success
        self.task = task
        if success is not None:
            self.success_once = bool(self.success_once) or success

    def moment(self, env_index: int, *, ends_for_good: bool) -> Moment:
        return Moment(
            env_index=env_index,
            episode_index=self.episode_index,
            seed=self.seed,
            num_actions=self.num_actions,
            success=self.success,
            reward_components=self.reward_components,
            is_past_end=ends_for_good and self.ended_at is not None and self.num_actions > self.ended_at,
        )

    def end(self, env_index: int) -> EpisodeEnd:
        """Returns the record of the episode when it ends now."""
        return EpisodeEnd(
            env_index=env_index,
            episode_index=self.episode_index,
            seed=self.seed,
            return_=self.return_,
            length=self.num_actions,
            success_once=self.success_once,
            success_at_end=self.success,
            task=self.task,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRule:
    """Decides when the episodes of a vector end."""

    max_episode_steps: int | None = None
    """Actions after which an episode is truncated; None: only the environment's limit."""
    ignore_terminations: bool = False
    """Continue after termination until the limit; for simulators that define such steps, which Gymnasium does not."""

    def __post_init__(self) -> None:
        limit = self.max_episode_steps
        if limit is not None and limit < 1:
            raise EnvError(f"max_episode_steps={limit}; it must be at least 1, or None for no limit")
        if self.ignore_terminations and limit is None:
            raise EnvError(
                "ignore_terminations=True needs a time limit, or episodes never end; set max_episode_steps "
                "(this environment has none of its own)"
            )

    def of(self, episode: RunningEpisode, *, terminated: bool, truncated: bool) -> tuple[bool, bool]:
        """Returns the reported (terminated, truncated) for the values that the environment returned."""
        at_limit = self.max_episode_steps is not None and episode.num_actions >= self.max_episode_steps
        terminated = terminated and not self.ignore_terminations
        return terminated, (truncated or at_limit) and not terminated


def require_envs(num_envs: int) -> None:
    """Raises: EnvError if `num_envs` is less than 1."""
    if num_envs < 1:
        raise EnvError(f"num_envs={num_envs}; at least one environment is needed")
