"""Writes episodes as mp4 files.

A `VideoRecorder` wraps an environment. For an environment in this process it films every action. For others (several
processes, a custom `BatchedEnv`) it films what `render` returns after each call, without images inside chunks and
without an episode's last image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlinf_envs.core.episodes import Moment, Watchable
from rlinf_envs.core.protocol import BatchedEnv, EpisodeEnd, Observation, StepResult
from rlinf_envs.core.seeding import episode_seed
from rlinf_envs.core.wrapper import EnvWrapper
from rlinf_envs.errors import EnvError


class _Clip:
    """The file of a running episode, with a temporary name until it is complete."""

    def __init__(self, folder: Path, moment: Moment, fps: float) -> None:
        self.moment = moment
        self._folder = folder
        self._name = f"env-{moment.env_index:03d}-episode-{moment.episode_index:04d}-seed-{moment.seed}"
        self._temporary = folder / f".recording-{self._name}.mp4"
        self._fps = fps
        self._writer: Any = None

    def add(self, picture: np.ndarray) -> None:
        if self._writer is None:
            self._writer = mp4_writer(self._temporary, self._fps)
        height, width = picture.shape[:2]
        even = np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")  # H.264 subsamples colours by 2
        self._writer.append_data(even)

    def end(self, outcome: str) -> Path:
        """Completes the file; `outcome` becomes the last part of its name."""
        self._writer.close()
        return self._temporary.replace(self._folder / f"{self._name}-{outcome}.mp4")


class VideoRecorder(EnvWrapper):
    """`env`, which writes the episodes of some rows to `folder` as they end.

    A file of the same name is replaced.

    Files are called env-000-episode-0002-seed-7-success.mp4; the last part is "success", "failure" (no success at any
    step), "end" if the environment does not define success, or "unfinished" for an episode cut off by reset or close.
    `rows` are the rows to record, `fps` is frames per second, `max_videos` the maximum number of files. Raises
    RenderingUnavailableError at the first reset if `env` cannot render, EnvError if imageio is missing.
    """

    def __init__(
        self,
        env: BatchedEnv,
        folder: Path | str,
        *,
        rows: Sequence[int] = (0,),
        fps: float = 20.0,
        max_videos: int | None = None,
    ) -> None:
        wrong = [row for row in rows if not 0 <= row < env.num_envs]
        if wrong:
            raise EnvError(f"rows={list(rows)}: there is no row {wrong[0]}; this environment has 0..{env.num_envs - 1}")
        require_video()
        super().__init__(env)
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._record_rows = tuple(rows)
        self._fps = fps
        self._max_videos = max_videos
        self._open: dict[int, _Clip] = {}
        self._complete: list[_Clip] = []
        self._paths: list[Path] = []
        self._watches = isinstance(env, Watchable)
        if isinstance(env, Watchable):
            env.watch(self._see)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files written so far, in the order in which episodes ended."""
        return tuple(self._paths)

    def reset(self, seeds: Sequence[int]) -> Observation:
        self._end_unfinished()
        seeds = list(seeds)
        observation = self._env.reset(seeds)
        if not self._watches:
            pictures = self._env.render().numpy()
            for row in self._record_rows:
                moment = Moment(env_index=row, episode_index=0, seed=seeds[row], num_actions=0)
                self._take(moment, pictures[row])
            self._row_seeds = seeds
        return observation

    def step(self, actions: Tensor) -> StepResult:
        return self._recorded(self._env.step(actions))

    def step_chunk(self, actions: Tensor) -> StepResult:
        return self._recorded(self._env.step_chunk(actions))

    def close(self) -> None:
        self._end_unfinished()
        if isinstance(self._env, Watchable):
            self._env.watch(None)
        super().close()

    def _see(self, moment: Moment) -> None:
        """Watcher of an environment in this process."""
        assert isinstance(self._env, Watchable), "only such an environment calls this"
        if moment.env_index in self._record_rows:
            needs_picture = moment.num_actions > 0 or self._has_room
            self._take(moment, self._env.render_row(moment.env_index) if needs_picture else None)

    @property
    def _has_room(self) -> bool:
        begun = len(self._paths) + len(self._open) + len(self._complete)
        return self._max_videos is None or begun < self._max_videos

    def _take(self, moment: Moment, picture: np.ndarray | None) -> None:
        """Adds an image to its row's film; the first image of an episode completes the previous film."""
        row = moment.env_index
        if moment.num_actions == 0:
            if row in self._open:
                self._complete.append(self._open.pop(row))
            if self._has_room:
                self._open[row] = _Clip(self._folder, moment, self._fps)
        if row in self._open and picture is not None:
            self._open[row].add(picture)

    def _recorded(self, result: StepResult) -> StepResult:
        if not self._watches:
            self._take_rendered(result)
        ends = {(end.env_index, end.episode_index): end for end in result.episodes}
        for clip in self._complete:
            end = ends[clip.moment.env_index, clip.moment.episode_index]
            self._paths.append(clip.end(_outcome(end)))
        self._complete.clear()
        return result

    def _take_rendered(self, result: StepResult) -> None:
        pictures = self._env.render().numpy()
        ends = {end.env_index: end for end in result.episodes}
        for row in self._record_rows:
            episode_index, num_actions = 0, 1  # for a continuing row, any values that are not a beginning
            if row in ends:
                episode_index, num_actions = ends[row].episode_index + 1, 0
            seed = episode_seed(self._row_seeds[row], episode_index)
            moment = Moment(env_index=row, episode_index=episode_index, seed=seed, num_actions=num_actions)
            self._take(moment, pictures[row])

    def _end_unfinished(self) -> None:
        for clip in [*self._complete, *self._open.values()]:
            self._paths.append(clip.end("unfinished"))
        self._complete.clear()
        self._open.clear()


def _outcome(end: EpisodeEnd) -> str:
    if end.success_once is None:
        return "end"
    return "success" if end.success_once else "failure"


def require_video() -> None:
    """Raises: EnvError that names the packages to install if videos cannot be written."""
    try:
        import imageio.v2  # noqa: F401
        import imageio_ffmpeg  # noqa: F401
    except ImportError as error:
        raise EnvError(f"videos need imageio and its ffmpeg ({error}); pip install 'rlinf-envs[video]'") from error


def mp4_writer(path: Path, fps: float) -> Any:
    """Returns imageio's writer of an H.264 file, for images [H, W, 3] uint8 with even sides."""
    import imageio.v2

    # macro_block_size=1: otherwise imageio rescales images to multiples of 16; H.264 only needs even sides.
    return imageio.v2.get_writer(path, format="FFMPEG", mode="I", fps=fps, codec="libx264", macro_block_size=1)  # type: ignore[arg-type]
