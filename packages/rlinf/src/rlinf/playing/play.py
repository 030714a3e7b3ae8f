"""Implements `rlinf play`: runs, records, films and plots episodes of a trained policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlinf.config.embodied import EVAL_SEED_LIMIT
from rlinf.config.load import to_yaml
from rlinf.errors import UserError
from rlinf.evaluation.folder import EvalFolder
from rlinf.jobs.films import check_video
from rlinf.playing import page
from rlinf.playing.checkpoint import TrainedPolicy
from rlinf.playing.protocol import Protocol
from rlinf.playing.session import Played, PolicySession, acts_alone_by_default
from rlinf.playing.tables import by_task, in_groups, summary
from rlinf.run_folder.rows import append_rows, naming, write_file
from rlinf_envs import EpisodeEnd, write_grid

MAX_FILMED = 24
"""Maximum number of episodes that are filmed and plotted; the table lists all."""
FILM, PAGE, EPISODES = "episodes.mp4", "play.html", "episodes.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Playback:
    """Result of a play."""

    episodes: tuple[EpisodeEnd, ...]
    film: Path | None
    page: Path
    groups: Mapping[str, str]
    """Task -> the group that tables show it in; empty: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """A prepared play: everything was checked, nothing is written or started."""

    policy: TrainedPolicy
    session: PolicySession
    first_seed: int
    num_episodes: int
    films: bool

    def run(self, path: Path, *, command: Sequence[str], message: Callable[[str], None]) -> Playback:
        """Plays the episodes and writes the results into a folder.

        Raises: RunFailed if a worker dies or raises.
        """
        inputs = {"checkpoint": str(self.policy.folder)}
        yaml = to_yaml(self.policy.config)
        with EvalFolder(path, resume=False, config_yaml=yaml, command=command, inputs=inputs, job="play") as folder:
            notes = [*self.session.notes]
            message(f"{self.title}: {self.line}")
            protocol = self._protocol()
            message(protocol.line)
            with self.session:
                played = self.session.play(
                    self.session.spec,
                    first_seed=self.first_seed,
                    num_episodes=self.num_episodes,
                    num_recorded=min(self.num_episodes, MAX_FILMED),
                )
            groups = self.session.task_groups({end.task for end in played.episodes if end.task is not None})
            film = self._film(path, played)
            notes += self._notes(played, film)
            folder.note(*notes)
            for note in notes:
                message(f"note: {note}")
            append_rows(path / EPISODES, _rows(played))
            with naming(path / PAGE):
                text = page.render(
                    self.title, f"{self.line}. {protocol.line}", played.episodes, played.recorded, film, notes, groups
                )
                write_file(path / PAGE, text)
            members = in_groups(played.episodes, groups) if groups else {}
            by_group = {"by_group": {name: summary(ends) for name, ends in members.items()}} if members else {}
            about = {"checkpoint": str(self.policy.folder), "digest": self.policy.digest()}
            about |= {"batch_size": self.session.batch_size}
            about |= {"protocol": protocol.to_json()}
            folder.write_result({**about, **summary(played.episodes), **by_group})
        return Playback(episodes=played.episodes, film=film, page=path / PAGE, groups=groups)

    @property
    def title(self) -> str:
        return self.policy.title

    @property
    def line(self) -> str:
        """Describes what was played."""
        seeds = f"seeds {self.first_seed} to {self.first_seed + self.num_episodes - 1}"
        return f"{self.num_episodes} episodes in {self.session.spec.id}, {seeds}, without exploration"

    def _protocol(self) -> Protocol:
        return self.session.protocol(self.session.spec, first_seed=self.first_seed, num_episodes=self.num_episodes)

    def _film(self, path: Path, played: Played) -> Path | None:
        if not self.films:
            return None
        return path / FILM if write_grid(path / FILM, played.recorded, fps=self.session.fps) else None

    def _notes(self, played: Played, film: Path | None) -> list[str]:
        notes = []
        if self.films and film is None:
            why = "; ".join(played.problems) or "it draws nothing"
            notes.append(f"there is no film: the policy sees no picture, and {self.session.spec.id} cannot draw: {why}")
        if self.num_episodes > len(played.recorded):
            notes.append(f"the first {len(played.recorded)} of {self.num_episodes} episodes are filmed and drawn")
        return notes


def prepare(
    policy: TrainedPolicy,
    path: Path,
    *,
    first_seed: int | None,
    num_episodes: int,
    films: bool,
    one_by_one: bool = False,
    is_citable: bool = False,
) -> Play:
    """Checks everything in advance.

    Args:
        path: the output folder.
        first_seed: seed of the first episode; None: that of the run's evaluations.
        one_by_one: the policy answers one environment at a time, so that numbers depend on no batch.
        is_citable: `one_by_one` where `acts_alone_by_default`.

    Raises: UserError.
    """
    first = policy.config.env.eval_seed if first_seed is None else first_seed
    check_seeds(first, num_episodes)
    if films:
        check_video("--no-video plays without a film")
    session = PolicySession(
        policy,
        num_episodes=num_episodes,
        log_folder=path / "logs",
        acts_one_by_one=one_by_one or (is_citable and acts_alone_by_default(policy.config)),
    )
    return Play(policy=policy, session=session, first_seed=first, num_episodes=num_episodes, films=films)


def check_seeds(first_seed: int, num_episodes: int, *, at: str = "--seed ") -> None:
    """Raises: UserError, with the prefix `at`, for seeds that training may have used."""
    if not 0 <= first_seed <= EVAL_SEED_LIMIT - num_episodes:
        raise UserError(
            f"{at}{first_seed}: {num_episodes} seeds from there on are not all in 0..2**31 - 1, below those of "
            "training",
            hint="use a smaller seed, or leave it out",
        )


def _rows(played: Played) -> list[dict[str, Any]]:
    """Returns a row per episode, with its actions and rewards if recorded."""
    recorded = {episode.end.seed: episode for episode in played.recorded}
    rows = []
    for end in by_task(played.episodes):
        facts = asdict(end)
        row = {"task": end.task, "seed": end.seed, "return": end.return_}
        row |= {name: facts[name] for name in ("length", "success_once", "success_at_end")}
        if (episode := recorded.get(end.seed)) is not None:
            row |= {"rewards": episode.rewards.tolist(), "actions": episode.actions.tolist()}
        rows.append(row)
    return rows
