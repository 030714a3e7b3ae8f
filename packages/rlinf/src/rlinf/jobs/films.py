"""Films of a run's evaluations: what the env workers kept, as one file for each evaluation.

videos/step-000100.mp4    after 100 training steps
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.run_folder.folder import VIDEOS, film_path
from rlinf_envs import EnvError, EnvSpec, RecordedEpisode, make_env, require_video, with_drawing, write_grid
from rlinf_workers import WorkerGroup
from rlinf_workers.policies import Needs
from rlinf_workers.roles import one_step

ACTIONS_PER_S = 20.0
"""Speed of a film."""
LEAST_FPS = 4.0


def check_video(otherwise: str) -> None:
    """Raises: UserError where films cannot be written; `otherwise` is what can be done without."""
    try:
        require_video()
    except EnvError as error:
        raise UserError(str(error).replace("rlinf-envs[video]", "rlinf[video]"), hint=otherwise) from error


def film_if_possible(config: Any, section: str) -> tuple[Any, list[str]]:
    """Returns the config and notes: where films cannot be written, `num_films` of the section is 0; a note says why."""
    values = getattr(config, section)
    if not values.num_films:
        return config, []
    try:
        check_video("")
    except UserError as error:
        without = config.model_copy(update={section: values.model_copy(update={"num_films": 0})})
        return without, [f"{section}.num_films={values.num_films}: nothing is filmed: {error.message}"]
    return config, []


def check_draws(spec: EnvSpec) -> None:
    """Raises: UserError for an environment that draws nothing."""
    hint = "use --env.num_eval_videos 0"
    try:
        env = make_env(with_drawing(one_step(spec)))
        try:
            env.reset([0])
            env.render()
        finally:
            env.close()
    except Exception as error:  # simulators raise what they like where they cannot draw
        raise UserError(
            f"env.num_eval_videos: the policy sees no picture, and env.id={spec.id!r} cannot draw: {error}", hint=hint
        ) from error


def fps(needs: Needs) -> float:
    """Pictures a second: what is seen has one for each answer of the policy, what is drawn one for each action."""
    sees = any(name.startswith("image.") for name in needs.reads)
    return max(LEAST_FPS, ACTIONS_PER_S / needs.chunk_size) if sees else ACTIONS_PER_S


def collect(env: WorkerGroup, folder: Path) -> tuple[list[RecordedEpisode], list[str]]:
    """The episodes that the env workers kept, by seed, and why some have no pictures.

    Args:
        folder: seen by all of them; holds the episodes for a moment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".episodes-") as shared:
        problems = [problem for of_rank in env.call("save_recordings", shared) for problem in of_rank]
        episodes = [RecordedEpisode.load(file) for file in Path(shared).glob("*.npz")]
    return sorted(episodes, key=lambda episode: episode.end.seed), list(dict.fromkeys(problems))


def write_film(env: WorkerGroup, run: Path, step: int, needs: Needs) -> list[str]:
    """Writes the film of the evaluation after `step` training steps. Returns: what was wrong with it."""
    episodes, problems = collect(env, run / VIDEOS)
    write_grid(film_path(run, step), episodes, fps=fps(needs))
    return problems
