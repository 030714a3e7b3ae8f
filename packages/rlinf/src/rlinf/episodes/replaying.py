"""Replays kept episodes of a run in an environment as its training had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rlinf.config.playing import TrainedConfig
from rlinf.errors import UserError
from rlinf.jobs.acting import env_spec
from rlinf.jobs.embodied.success_classifier import saved_classifier
from rlinf.jobs.films import ACTIONS_PER_S
from rlinf_envs import EnvError, EpisodeRecorder, RecordedEpisode, open_replay, write_grid

REPLAYS = "replays"
"""Folder of a run with the films of replayed episodes."""


@contextmanager
def opened_env(run: Path, config: TrainedConfig, *, films: bool) -> Iterator[EpisodeRecorder]:
    """One environment of the run's training, in this process. Raises: UserError if it cannot be created."""
    if "env" in config.venvs:
        raise UserError(
            f"venvs.env={config.venvs['env']}: the environments of this run need a venv of their own, and episodes are "
            "replayed in this process",
            hint="run rlinf replay with that venv's Python, and --venvs '{}'",
        )
    spec = replace(env_spec(config.env), success_classifier=saved_classifier(run))
    try:
        recorder = open_replay(spec, films=films)
    except EnvError as error:
        raise UserError(f"env.id={spec.id!r}: {error}") from error
    try:
        yield recorder
    except EnvError as error:
        raise UserError(f"env.id={spec.id!r}: {error}") from error
    finally:
        recorder.close()


def write_film(path: Path, recorded: RecordedEpisode) -> bool:
    """Writes one episode as an mp4 file. Returns False, without a file, if it has no pictures."""
    return write_grid(path, [recorded], fps=ACTIONS_PER_S)
