"""Records complete episodes: every action and reward, and observed or rendered images.

An `EpisodeRecorder` wraps an environment and does not change its numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlinf_envs.core.env_spec import EnvSpec
from rlinf_envs.core.episodes import Moment, Watchable
from rlinf_envs.core.factory import make_env
from rlinf_envs.core.picture_memory import PictureMemory
from rlinf_envs.core.protocol import BatchedEnv, EpisodeEnd, Observation, StepResult, tensor_field
from rlinf_envs.core.wrapper import EnvWrapper
from rlinf_envs.errors import EnvError
from rlinf_envs.kinds import kind_spec
from rlinf_envs.recording.kept import end_so_far

MAX_HEIGHT = 256
"""Maximum height in pixels. Larger images are scaled down, so that an episode stays at a few megabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEpisode:
    """One episode from its reset to its end; T actions."""

    end: EpisodeEnd
    actions: np.ndarray
    """[T, *action shape] as executed: clipped."""
    rewards: np.ndarray
    """[T] float32"""
    pictures: np.ndarray
    """[P, H, W, 3] uint8, at most `MAX_HEIGHT` high, the first one after the reset. Observed images: one per call of
    the policy, and the last one; rendered images: one per action. P is 0 without images."""
    successes: np.ndarray | None = None
    """[T] bool: whether the task counted as solved after each action; None if the environment does not define that, or
    not in this process."""
    reward_components: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Name -> [T] float64, what the rewards consist of, 0 for actions that do not report it; empty if the environment
    reports nothing, or not in this process. `save` leaves them out."""

    def save(self, folder: Path) -> Path:
        """Writes the episode to seed-<seed>.npz."""
        path = folder / f"seed-{self.end.seed}.npz"
        end = np.array(json.dumps(asdict(self.end)))
        more: dict[str, Any] = {} if self.successes is None else {"successes": self.successes}
        np.savez(path, end=end, actions=self.actions, rewards=self.rewards, pictures=self.pictures, **more)
        return path

    @classmethod
    def load(cls, path: Path) -> RecordedEpisode:
        """Reads an episode that `save` wrote."""
        with np.load(path, allow_pickle=False) as archive:
            return cls(
                end=EpisodeEnd(**json.loads(str(archive["end"]))),
                actions=archive["actions"],
                rewards=archive["rewards"],
                pictures=archive["pictures"],
                successes=archive["successes"] if "successes" in archive.files else None,
            )


@dataclass(kw_only=True, slots=True)
class _Take:
    """A running episode."""

    seed: int
    actions: list[np.ndarray] = field(default_factory=list)
    rewards: list[np.ndarray] = field(default_factory=list)
    pictures: list[np.ndarray] = field(default_factory=list)
    successes: list[bool | None] = field(default_factory=list)
    reward_components: list[Mapping[str, float]] = field(default_factory=list)


class EpisodeRecorder(EnvWrapper):
    """`env`, which records the episodes that begin with the requested seeds.

    Args:
        cameras: image fields to record side by side; none: what `env` renders: one image per action for an environment
            in this process, for others one per call, without the last one of an episode.

    If rendering fails, episodes have no images and `problem` has the reason.
    """

    def __init__(self, env: BatchedEnv, cameras: Sequence[str] = ()) -> None:
        super().__init__(env)
        self._cameras = tuple(cameras)
        self._seeds_left: set[int] = set()
        self._takes: dict[int, _Take] = {}
        self._episodes: list[RecordedEpisode] = []
        self.problem: str | None = None
        """Why there are no images; None if there are, or before the first attempt."""
        drawn = getattr(env, "undisturbed", env)
        self._watched = drawn if isinstance(drawn, Watchable) else None
        self._draws_moments = self._watched is not None and not self._cameras
        if self._watched is not None:
            self._watched.watch(self._see)

    def want(self, seeds: Iterable[int]) -> None:
        """Requests the next episode of each of these seeds, in place of earlier requests."""
        self._seeds_left = set(seeds)

    def take(self) -> list[RecordedEpisode]:
        """Returns and clears the recorded episodes, in the order in which they ended."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def take_running(self) -> list[RecordedEpisode]:
        """Returns and clears the recorded part of the episodes that are running and have actions."""
        takes, self._takes = self._takes, {}
        return [
            _whole(take, end_so_far(np.concatenate(take.rewards), take.seed, env_index=row))
            for row, take in takes.items()
            if take.actions
        ]

    def reset(self, seeds: Sequence[int]) -> Observation:
        seeds = list(seeds)
        self._takes = {}
        for row, seed in enumerate(seeds):
            if seed in self._seeds_left:
                self._seeds_left.remove(seed)  # a row that only pads a batch may have it too
                self._takes[row] = _Take(seed=seed)
        observation = self._env.reset(seeds)
        if not self._draws_moments:
            self._look(observation, self._takes)
        return observation

    def step(self, actions: Tensor) -> StepResult:
        result = self._env.step(actions)
        self._keep(actions[:, None], result.rewards[:, None], result)
        return result

    def step_chunk(self, actions: Tensor) -> StepResult:
        result = self._env.step_chunk(actions)
        self._keep(actions, result.rewards, result)
        return result

    def close(self) -> None:
        if self._watched is not None:
            self._watched.watch(None)
        super().close()

    def _keep(self, actions: Tensor, rewards: Tensor, result: StepResult) -> None:
        if not self._takes:
            return
        executed = self._env.action_spec.checked(actions, self.num_envs, chunk=True)
        ends = {end.env_index: end for end in result.episodes}
        for row, take in self._takes.items():
            count = int(result.num_steps[row])
            take.actions.append(executed[row, :count])
            take.rewards.append(rewards[row, :count].numpy())
        if self._cameras:
            self._look(result.final_observation, self._takes)  # equals the observation if no episode has ended
        elif not self._draws_moments:
            self._look(result.observation, [row for row in self._takes if row not in ends])
        for row in [row for row in self._takes if row in ends]:
            self._episodes.append(_whole(self._takes.pop(row), ends[row]))

    def _look(self, observation: Observation, rows: Iterable[int]) -> None:
        """Takes one image of each of the rows."""
        rows = list(rows)
        if self._cameras:
            views = [tensor_field(observation, name) for name in self._cameras]
            for row in rows:
                self._takes[row].pictures.append(_small(side_by_side([pictures[row].numpy() for pictures in views])))
        elif rows and self.problem is None:
            try:
                drawn = self._env.render().numpy()
            except Exception as error:  # noqa: BLE001 - simulators raise any error if they cannot render
                self.problem = _reason(error)
                return
            for row in rows:
                self._takes[row].pictures.append(_small(drawn[row]))

    def _see(self, moment: Moment) -> None:
        """Watcher of an environment in this process."""
        take = self._takes.get(moment.env_index)
        if take is None or moment.episode_index:
            return
        if moment.num_actions:
            take.successes.append(moment.success)
            take.reward_components.append(moment.reward_components)
        if not self._draws_moments or self.problem is not None:
            return
        assert self._watched is not None, "only such an environment calls this"
        try:
            picture = self._watched.render_row(moment.env_index)
        except Exception as error:  # noqa: BLE001 - as above
            self.problem = _reason(error)
        else:
            take.pictures.append(_small(picture))


def recorded_env(
    spec: EnvSpec,
    cameras: Sequence[str] = (),
    *,
    on_replaced: Callable[[str], None] | None = None,
    pictures: PictureMemory | None = None,
) -> EpisodeRecorder:
    """Creates an environment with a recorder, and with rendering if no cameras are given. If that fails, it is created
    without rendering, and the recorder's `problem` has the reason. `on_replaced`, `pictures`: as for `make_env`."""
    make = partial(make_env, on_replaced=on_replaced, pictures=pictures)
    if cameras:
        return EpisodeRecorder(make(spec), cameras)
    try:
        return EpisodeRecorder(make(with_drawing(spec)))
    except EnvError as error:
        recorder = EpisodeRecorder(make(spec))
        recorder.problem = str(error)
        return recorder


def with_drawing(spec: EnvSpec) -> EnvSpec:
    """Returns the description with the options that its kind needs for rendering."""
    return replace(spec, options={**kind_spec(spec.kind, spec.id).drawing_options(spec.id), **spec.options})


def side_by_side(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Joins images [H, W, C] uint8 to [H, W, 3], as high as the highest, padded with black; of two channels the first
    is used, of more than three the first three."""
    height = max(picture.shape[0] for picture in pictures)
    columns = [
        np.pad(np.broadcast_to(one, (*one.shape[:2], 3)), ((0, height - one.shape[0]), (0, 0), (0, 0)))
        for one in (picture[..., : 3 if picture.shape[2] >= 3 else 1] for picture in pictures)
    ]
    return np.concatenate(columns, axis=1)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"


def _small(picture: np.ndarray) -> np.ndarray:
    """Returns a copy at most `MAX_HEIGHT` high, averaged over squares of pixels."""
    factor = -(-picture.shape[0] // MAX_HEIGHT)
    if factor == 1:
        return picture.copy()
    height, width = (side // factor * factor for side in picture.shape[:2])
    squares = picture[:height, :width].reshape(height // factor, factor, width // factor, factor, -1)
    return squares.mean(axis=(1, 3)).astype(np.uint8)


def _whole(take: _Take, end: EpisodeEnd) -> RecordedEpisode:
    pictures: Any = np.stack(take.pictures) if take.pictures else np.zeros((0, 1, 1, 3), np.uint8)
    is_known = bool(take.successes) and None not in take.successes
    return RecordedEpisode(
        end=end,
        actions=np.concatenate(take.actions),
        rewards=np.concatenate(take.rewards),
        pictures=pictures,
        successes=np.array(take.successes, bool) if is_known else None,
        reward_components={
            name: np.array([components.get(name, 0.0) for components in take.reward_components])
            for name in dict.fromkeys(name for components in take.reward_components for name in components)
        },
    )
