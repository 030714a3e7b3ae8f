"""Replays kept episodes and writes what was observed as a LeRobot dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.config.playing import TrainedConfig
from rlinf.episodes.chosen import ChosenEpisode, in_order, kept_files, read_step
from rlinf.episodes.replaying import opened_env
from rlinf.errors import UserError
from rlinf_envs import LeRobotWriter, demonstrate


@dataclass(frozen=True, kw_only=True, slots=True)
class LeRobotExport:
    """A dataset that was written."""

    num_episodes: int
    num_actions: int
    different: tuple[str, ...]
    """Episodes that were left out because their replay differs, each with the first difference."""


def successes(run: Path, step: int | None, env_index: int | None) -> list[ChosenEpisode]:
    """Returns the kept episodes that ended as solved; None: of all steps, of all environments. Raises: UserError."""
    steps = list(kept_files(run)) if step is None else [step]
    episodes = [chosen for each in steps for chosen in in_order(read_step(run, each))]
    return [
        chosen
        for chosen in episodes
        if chosen.episode.end.success_at_end and env_index in (None, chosen.episode.end.env_index)
    ]


def export_lerobot(
    run: Path,
    config: TrainedConfig,
    episodes: Sequence[ChosenEpisode],
    folder: Path,
    fps: int,
    *,
    show: Callable[[int], None],
) -> LeRobotExport:
    """Writes a dataset with all that the environment shows; `show` is called with the number of episodes done.

    Raises: UserError if the environment or the folder cannot be created, there are no episodes, or no replay is equal.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--export {folder}: the folder is not empty", hint="name a new one")
    if not episodes:
        raise UserError("none of the kept episodes ended as solved", hint="rlinf replay RUN --list shows what is kept")
    different: list[str] = []
    num_episodes = num_actions = 0
    with (
        opened_env(run, config, films=False) as recorder,
        LeRobotWriter(folder, recorder.observation_spec, recorder.action_spec, fps=fps) as writer,
    ):
        for number, chosen in enumerate(episodes, 1):
            task = chosen.episode.end.task or config.env.id
            replayed, demonstration = demonstrate(recorder, chosen.episode, task)
            if replayed.difference is None:
                writer.add(demonstration)
                num_episodes, num_actions = num_episodes + 1, num_actions + len(demonstration.actions)
            else:
                different.append(f"{chosen.name}: {replayed.difference}")
            show(number)
        if not num_episodes:
            raise UserError(f"nothing is written, as no replay equals its episode. {different[0]}")
    return LeRobotExport(num_episodes=num_episodes, num_actions=num_actions, different=tuple(different))
