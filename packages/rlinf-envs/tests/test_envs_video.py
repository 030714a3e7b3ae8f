"""Films are read back: how many pictures, in which order, under which name."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("imageio_ffmpeg")
import imageio.v2

from rlinf_envs import ActionSpec, EnvError, FieldSpec, episode_seed
from rlinf_envs.core.vector import InProcessVector, SingleObservation, SingleStep
from rlinf_envs.recording.video import VideoRecorder
from rlinf_envs.testing import check_env


class Lamp:
    """Shows its count as brightness; odd pictures on purpose (odd sides). Solved at a count of 4 and more."""

    action_spec = ActionSpec(kind="discrete", shape=(), low=torch.tensor(0), high=torch.tensor(1))
    observation_spec = {"state": FieldSpec(shape=(1,), dtype="float32")}  # noqa: RUF012
    notes = ()

    def __init__(self) -> None:
        self.count = 0

    def observe(self) -> SingleObservation:
        return {"state": np.array([self.count], dtype=np.float32)}

    def reset(self, seed: int) -> None:
        self.count = seed % 2

    def step(self, action: np.ndarray) -> SingleStep:
        self.count += int(action)
        solved = self.count >= 4
        return SingleStep(reward=0.0, terminated=solved, truncated=False, success=solved)

    def render(self) -> np.ndarray:
        return np.full((31, 45, 3), 40 * self.count, dtype=np.uint8)

    def close(self) -> None:
        pass


def lamps(num_envs: int = 2) -> InProcessVector:
    return InProcessVector(Lamp, num_envs, max_episode_steps=6)


def brightness(path: Path) -> list[int]:
    """The mean brightness of each picture in units of the lamp's count, rounded because compression is lossy."""
    with imageio.v2.get_reader(path) as reader:
        pictures = [np.asarray(picture) for picture in reader]  # type: ignore[attr-defined]
    assert all(picture.shape == (32, 46, 3) for picture in pictures)
    return [round(float(picture.mean()) / 40) for picture in pictures]


def test_a_film_holds_every_picture_of_its_episode(tmp_path: Path) -> None:
    env = VideoRecorder(lamps(), tmp_path / "films", rows=(0, 1))
    env.reset([2, 3])
    for _ in range(5):
        env.step(torch.tensor([1, 0]))
    assert [path.name for path in env.paths] == ["env-000-episode-0000-seed-2-success.mp4"]
    assert brightness(env.paths[0]) == [0, 1, 2, 3, 4]
    env.step(torch.tensor([1, 0]))
    assert env.paths[1].name == "env-001-episode-0000-seed-3-failure.mp4"
    assert brightness(env.paths[1]) == [1] * 7
    env.close()
    second = episode_seed(2, 1)
    assert env.paths[2].name == f"env-000-episode-0001-seed-{second}-unfinished.mp4"
    assert sorted(tmp_path.glob("films/*")) == sorted(env.paths)  # and nothing temporary is left
    assert not list(tmp_path.glob("films/.recording*"))


def test_chunks_are_seen_action_by_action(tmp_path: Path) -> None:
    env = VideoRecorder(lamps(1), tmp_path)
    env.reset([0])
    env.step_chunk(torch.ones(1, 3, dtype=torch.int64))
    env.step_chunk(torch.ones(1, 3, dtype=torch.int64))
    assert brightness(env.paths[0]) == [0, 1, 2, 3, 4]


def test_an_environment_of_another_kind_is_filmed_through_render(tmp_path: Path) -> None:
    class Opaque:
        """A BatchedEnv that is no InProcessVector."""

        def __init__(self) -> None:
            self._inner = lamps(2)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    env = VideoRecorder(Opaque(), tmp_path, rows=(1,))  # type: ignore[arg-type]
    env.reset([1, 0])
    for _ in range(5):
        env.step(torch.tensor([0, 1]))
    (path,) = env.paths
    assert path.name == "env-001-episode-0000-seed-0-success.mp4"
    assert brightness(path) == [0, 1, 2, 3]
    env.reset([0, 0])
    assert env.paths[1].name == f"env-001-episode-0001-seed-{episode_seed(0, 1)}-unfinished.mp4"
    env.close()


def test_max_videos_bounds_the_number(tmp_path: Path) -> None:
    env = VideoRecorder(lamps(2), tmp_path, rows=(0, 1), max_videos=3)
    env.reset([0, 0])
    for _ in range(20):
        env.step(torch.tensor([1, 1]))
    env.close()
    assert len(list(tmp_path.iterdir())) == len(env.paths) == 3


def test_recorder_is_an_environment(tmp_path: Path) -> None:
    check_env(lambda: VideoRecorder(lamps(2), tmp_path, max_videos=1), num_steps=12)


def test_a_row_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"rows=\[0, 2\]: there is no row 2; this environment has 0..1"):
        VideoRecorder(lamps(2), tmp_path, rows=(0, 2))


def test_missing_imageio_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("imageio"):
            raise ImportError(f"No module named {name!r}")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EnvError, match=r"pip install 'rlinf-envs\[video\]'"):
        VideoRecorder(lamps(1), tmp_path)
