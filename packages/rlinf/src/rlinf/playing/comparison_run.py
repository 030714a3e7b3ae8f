"""Runs a comparison of two policies, from its config to its result.

config.yaml     the settings; --resume starts from it
episodes.jsonl  a row for each episode, written as each block of episodes ends
result.json     the protocol, the difference with its interval, McNemar's test, tasks, and the flipped starts
compare.html    the same as a page
flipped.mp4     flipped starts, played again: A on the left, B on the right
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlinf.config.comparison import ComparisonConfig
from rlinf.config.load import to_yaml
from rlinf.errors import UserError
from rlinf.evaluation.folder import EvalFolder
from rlinf.jobs.films import film_if_possible
from rlinf.playing import comparison_page
from rlinf.playing.checkpoint import trained_policy
from rlinf.playing.comparison_scores import ComparisonScore, StartOutcome, paired, to_json
from rlinf.playing.play import check_seeds
from rlinf.playing.protocol import Protocol, check_same, joint
from rlinf.playing.session import PolicySession, acts_alone_by_default
from rlinf.run_folder.rows import append_rows, read_rows, sync, write_file
from rlinf_envs import RecordedEpisode, write_grid

EPISODES, FILM = "episodes.jsonl", "flipped.mp4"
LEAST_BLOCK = 16
"""Least number of episodes that are played before they are written down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonRun:
    """A prepared comparison: both policies and their environments were checked, nothing is written or started."""

    config: ComparisonConfig
    sessions: dict[str, PolicySession]
    """Of a and b."""
    protocols: dict[str, Protocol]
    first_seed: int
    notes: tuple[str, ...]

    def run(
        self, path: Path, *, resume: bool, command: Sequence[str], message: Callable[[str], None]
    ) -> ComparisonScore:
        """Plays the remaining episodes of both policies and compares them.

        Raises: UserError if the folder does not fit, RunFailed if a worker dies or raises.
        """
        policies = {side: session.policy for side, session in self.sessions.items()}
        inputs = {f"checkpoint {side}": policy.digest() for side, policy in policies.items()}
        inputs |= {f"the protocol of {side}": protocol.digest for side, protocol in self.protocols.items()}
        options = {"config_yaml": to_yaml(self.config), "command": command, "inputs": inputs, "notes": self.notes}
        with EvalFolder(path, resume=resume, job="comparison", **options) as folder:
            for text in (*(f"note: {note}" for note in self.notes), self.line, *self._protocol_lines()):
                message(text)
            film = self._play_and_film(path, message)
            score, notes = self._score(path), [*self.notes, *film.notes]
            folder.note(*film.notes)
            record = joint(*(protocol.to_json() for protocol in self.protocols.values()))
            folder.write_result({**self._about(inputs), "protocol": record, "notes": notes, **to_json(score)})
            film_path = path / FILM if (path / FILM).exists() else None
            page = comparison_page.render(self.line, score, record, film_path, notes)
            write_file(path / comparison_page.PAGE, page)
        return score

    @property
    def names(self) -> tuple[str, str]:
        """Run and checkpoint of A and of B."""
        return self.sessions["a"].policy.title, self.sessions["b"].policy.title

    @property
    def line(self) -> str:
        """Describes the comparison."""
        count = self.config.compare.num_episodes
        return f"A is {self.names[0]}, B is {self.names[1]}: {count} episodes of each in {self.config.a.env.id}"

    def _protocol_lines(self) -> list[str]:
        lines = [protocol.line for protocol in self.protocols.values()]
        return (
            lines[:1] if lines[0] == lines[1] else [f"{side}: {line}" for side, line in zip("AB", lines, strict=True)]
        )

    def _about(self, inputs: dict[str, str]) -> dict[str, Any]:
        return {
            side: {
                "name": session.policy.config.name,
                "checkpoint": str(session.policy.folder),
                "digest": inputs[f"checkpoint {side}"],
                "batch_size": session.batch_size,
            }
            for side, session in self.sessions.items()
        }

    def _play_and_film(self, path: Path, message: Callable[[str], None]) -> _Film:
        """Plays what is missing, then the flipped starts again for the film."""
        film = _Film()
        for side, session in self.sessions.items():
            blocks = self._missing(path, side)
            if blocks:
                with session:
                    for first, count in blocks:
                        played = session.play(session.spec, first_seed=first, num_episodes=count)
                        append_rows(path / EPISODES, [{"policy": side, **asdict(end)} for end in played.episodes])
                        sync(path / EPISODES)
                        message(f"{side.upper()}: {self._so_far(path, side)}")
        flipped = self._score(path).flipped[: self.config.compare.num_films]
        if flipped and not (path / FILM).exists():
            for side, session in self.sessions.items():
                film.add(side, session, flipped)
            film.write(path / FILM, flipped, self.sessions["a"].fps)
        return film

    def _missing(self, path: Path, side: str) -> list[tuple[int, int]]:
        """Returns (first seed, number) of the blocks that have not been written whole. Blocks hold whole batches of
        environments, so that they divide the episodes as one long evaluation does."""
        num_envs = self.sessions[side].policy.config.env.num_envs
        size = num_envs * max(1, -(-LEAST_BLOCK // num_envs))
        last = self.first_seed + self.config.compare.num_episodes
        blocks = [(first, min(size, last - first)) for first in range(self.first_seed, last, size)]
        done = {row["seed"] for row in read_rows(path / EPISODES) if row["policy"] == side}
        return [(first, count) for first, count in blocks if not done >= set(range(first, first + count))]

    def _so_far(self, path: Path, side: str) -> str:
        rows = _rows_of(path, side)
        right = sum(bool(row["success_at_end"]) for row in rows)
        return f"{right} of {len(rows)} episodes end in success"

    def _score(self, path: Path) -> ComparisonScore:
        rows = {side: _rows_of(path, side) for side in ("a", "b")}
        tasks = {row["task"] for row in rows["a"] if row["task"] is not None}
        return paired(rows["a"], rows["b"], self.sessions["a"].task_groups(tasks))


class _Film:
    """Flipped starts as both policies play them again."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._recorded: dict[tuple[str, int], RecordedEpisode] = {}

    def add(self, side: str, session: PolicySession, starts: Sequence[StartOutcome]) -> None:
        with session:
            for start in starts:
                played = session.play(session.spec, first_seed=start.seed, num_episodes=1, num_recorded=1)
                self.notes += [problem for problem in played.problems if problem not in self.notes]
                (end,) = played.episodes
                if bool(end.success_at_end) != getattr(start, side):
                    self.notes.append(
                        f"{side.upper()}, seed {start.seed}: played alone for the film, the episode ends otherwise, "
                        "since the policy answered in another batch; --compare.one_by_one true prevents this"
                    )
                for episode in played.recorded:
                    self._recorded[side, start.seed] = episode

    def write(self, path: Path, starts: Sequence[StartOutcome], fps: float) -> None:
        keys = [(side, start.seed) for start in starts for side in ("a", "b")]
        episodes = [self._recorded[key] for key in keys if key in self._recorded]
        titles = [f"{side.upper()}" for side, seed in keys if (side, seed) in self._recorded]
        tasks = [f" {episode.end.task}" if episode.end.task else "" for episode in episodes]
        titles = [f"{title}{task}" for title, task in zip(titles, tasks, strict=True)]
        write_grid(path, episodes, fps=fps, titles=titles, columns=2)


def _rows_of(path: Path, side: str) -> list[dict[str, Any]]:
    """Returns the last row of each seed; a block that was torn by a crash is played again as a whole."""
    rows = {row["seed"]: row for row in read_rows(path / EPISODES) if row["policy"] == side}
    return [rows[seed] for seed in sorted(rows)]


def prepare(config: ComparisonConfig, path: Path) -> ComparisonRun:
    """Checks both policies and creates their environments once.

    Args:
        path: the output folder.

    Raises: UserError, also if the protocols differ and `compare.force` is not set.
    """
    compare = config.compare
    first_seed = config.a.env.eval_seed if compare.first_seed is None else compare.first_seed
    check_seeds(first_seed, compare.num_episodes, at="--compare.first_seed ")
    config, film_notes = film_if_possible(config, "compare")
    notes = [*config.notes, *film_notes]
    sessions = {side: _session(getattr(config, side), config, path / "logs" / side) for side in ("a", "b")}
    protocols = {
        side: session.protocol(session.spec, first_seed=first_seed, num_episodes=compare.num_episodes)
        for side, session in sessions.items()
    }
    if not compare.force:
        check_same(protocols["a"].to_json(), protocols["b"].to_json(), ("A", "B"))
    notes += [note for session in sessions.values() for note in session.notes if note not in notes]
    return ComparisonRun(
        config=config, sessions=sessions, protocols=protocols, first_seed=first_seed, notes=tuple(notes)
    )


def _session(compared: Any, config: ComparisonConfig, log_folder: Path) -> PolicySession:
    one_by_one = config.compare.one_by_one
    if one_by_one is None:
        one_by_one = acts_alone_by_default(compared)
    session = PolicySession(
        trained_policy(compared.checkpoint, compared),
        num_episodes=config.compare.num_episodes,
        log_folder=log_folder,
        acts_one_by_one=one_by_one,
    )
    if not session.interface.knows_success:
        raise UserError(
            f"--compare: {session.spec.id} never says that an episode succeeded, and success is compared",
            hint="rlinf play shows the returns of each",
        )
    return session
