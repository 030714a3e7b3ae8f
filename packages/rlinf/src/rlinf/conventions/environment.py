"""Compares demonstrations with the environment: replays their actions, and looks at first frames and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlinf.conventions.observations import PICTURE_TURNS
from rlinf.conventions.scoring import OpenLoopError, is_better
from rlinf_envs import PICTURE, Demonstration, EnvSpec, make_env

NUM_REPLAYED = 5
NUM_RESETS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Replays:
    """Result of replaying demonstrations."""

    num_replayed: int
    """0: they cannot be replayed."""
    num_successful: int
    text: str
    """The result, or why there is none."""

    @property
    def failed(self) -> bool:
        return self.num_replayed > 0 and self.num_successful < self.num_replayed


def replays(spec: EnvSpec, demonstrations: Sequence[Demonstration]) -> Replays:
    """Executes the actions of some demonstrations from their reset seeds."""
    chosen = [one for one in demonstrations if one.seed is not None][:NUM_REPLAYED]
    if not chosen:
        text = (
            "not replayed: the files do not say in which state an episode began, so the environment cannot begin there"
        )
        return Replays(num_replayed=0, num_successful=0, text=text)
    outcomes = [_succeeds(spec, one) for one in chosen]
    if None in outcomes:
        text = "not replayed: the environment never says that an episode succeeded"
        return Replays(num_replayed=0, num_successful=0, text=text)
    count = sum(map(bool, outcomes))
    text = f"replayed from their seeds, the actions of {count} of {len(chosen)} demonstrations succeed"
    return Replays(num_replayed=len(chosen), num_successful=count, text=text)


def _succeeds(spec: EnvSpec, demonstration: Demonstration) -> bool | None:
    limit = max(spec.max_episode_steps or 0, len(demonstration.actions))
    env = make_env(replace(spec, num_envs=1, num_processes=0, max_episode_steps=limit))
    try:
        assert demonstration.seed is not None, "chosen because it has one"
        env.reset([demonstration.seed])
        last = demonstration.actions[-1]
        for action in [*demonstration.actions, *[last] * (limit - len(demonstration.actions))]:
            if episodes := env.step(action[None]).episodes:
                return episodes[0].success_once
    finally:
        env.close()
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameMismatch:
    """A convention on which environment and demonstrations differ, by their first frames."""

    convention: str
    change: str
    evidence: str


def frame_mismatches(
    spec: EnvSpec, demonstrations: Sequence[Demonstration], reads: Sequence[str]
) -> list[FrameMismatch]:
    """Compares the first pictures of demonstrations with the mean picture of the environment after resets, as they are
    and turned. A camera is fixed, so most of a picture is the same in every episode."""
    cameras = [name for name in reads if name.startswith(PICTURE)]
    if not cameras:
        return []
    means = _mean_pictures(spec, cameras)
    firsts = {name: _first(demonstrations, name) for name in cameras}
    mismatches = []
    for name in cameras:
        here = _distances(firsts[name], means[name])
        turned = {
            (convention, change): _distances(turn(firsts[name]), means[name])
            for convention, (change, turn) in PICTURE_TURNS.items()
        }
        others = {
            ("camera order", f"{name} is the environment's {other}"): _distances(firsts[name], means[other])
            for other in cameras
            if other != name and means[other].shape == means[name].shape
        }
        mismatches += _better(name, here, turned | others)
    return mismatches


def _better(name: str, here: OpenLoopError, others: Mapping[tuple[str, str], OpenLoopError]) -> list[FrameMismatch]:
    (convention, change), error = min(others.items(), key=lambda item: item[1].mean)
    if not is_better(error, here, num_comparisons=len(others)):
        return []
    evidence = (
        f"first frames of {name} are {error.mean:.1f} levels from the environment's with {change}, {here.mean:.1f} as "
        "they are"
    )
    return [FrameMismatch(convention=convention, change=change, evidence=evidence)]


def _mean_pictures(spec: EnvSpec, cameras: Sequence[str]) -> dict[str, Tensor]:
    env = make_env(replace(spec, num_envs=1, num_processes=0))
    try:
        pictures_by_name: dict[str, list[Tensor]] = {name: [] for name in cameras}
        for seed in range(NUM_RESETS):
            observation = env.reset([seed])
            for name in cameras:
                values = observation[name]
                assert isinstance(values, Tensor), "a picture is a tensor"
                pictures_by_name[name].append(values[0].float().clone())
    finally:
        env.close()
    return {name: torch.stack(pictures).mean(0) for name, pictures in pictures_by_name.items()}


def _first(demonstrations: Sequence[Demonstration], name: str) -> Tensor:
    firsts = [one.observations[name] for one in demonstrations]
    return torch.stack([values[0] for values in firsts if isinstance(values, Tensor)])


def _distances(pictures: Tensor, mean: Tensor) -> OpenLoopError:
    """Mean absolute difference of each picture, in levels of 0..255."""
    if pictures.shape[1:] != mean.shape:
        distance = torch.full((len(pictures),), 255.0)
    else:
        distance = (pictures.float() - mean).abs().flatten(1).mean(1)
    return OpenLoopError(by_number=distance.new_zeros(0), by_demonstration=distance)
