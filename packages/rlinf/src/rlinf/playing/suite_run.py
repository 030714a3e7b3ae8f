"""Runs a suite evaluation, from its config to its result: `seen`, then every variant, in the same processes.

config.yaml     the settings; --resume starts from it
episodes.jsonl  a row for each episode, written as its variant ends
result.json     success by variant and by axis
suite.html      the same as a page
films.mp4       some episodes of each variant
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.config.load import to_yaml
from rlinf.config.suites import AXES, SEEN, DisturbConfig, SuiteEvalConfig, VariantConfig
from rlinf.errors import UserError
from rlinf.evaluation.folder import EvalFolder
from rlinf.jobs.films import film_if_possible
from rlinf.playing import suite_page
from rlinf.playing.checkpoint import TrainedPolicy, trained_policy
from rlinf.playing.play import check_seeds
from rlinf.playing.protocol import Protocol
from rlinf.playing.session import Played, PolicySession
from rlinf.playing.suite_scores import VariantScore, score, to_json
from rlinf.run_folder.rows import append_rows, keep_rows, read_rows, sync, write_file
from rlinf_envs import Disturbance, EnvSpec, EpisodeEnd, RecordedEpisode, write_grid

EPISODES, PAGE, FILM = "episodes.jsonl", "suite.html", "films.mp4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One variant, ready to be played."""

    name: str
    axis: str
    about: str
    spec: EnvSpec
    first_seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRun:
    """A prepared suite evaluation: every variant was created once and checked, nothing is written or started."""

    config: SuiteEvalConfig
    policy: TrainedPolicy
    session: PolicySession
    variants: tuple[Variant, ...]
    """`seen` first."""
    notes: tuple[str, ...]

    def run(
        self, path: Path, *, resume: bool, command: Sequence[str], message: Callable[[str], None]
    ) -> list[VariantScore]:
        """Plays the remaining episodes and scores all.

        Raises: UserError if the folder does not fit, RunFailed if a worker dies or raises.
        """
        inputs = {"the checkpoint": self.policy.digest()}
        options = {"config_yaml": to_yaml(self.config), "command": command, "inputs": inputs, "notes": self.notes}
        with EvalFolder(path, resume=resume, job="suite", **options) as folder:
            for note in self.notes:
                message(f"note: {note}")
            message(f"{self.title}: {self.line}")
            protocols = self._protocols()
            message(protocols[SEEN].line)
            recorded, problems = self._play(path, message)
            folder.note(*problems)
            scores = self._scores(path)
            film = path / FILM
            if recorded:
                write_grid(film, recorded, fps=self.session.fps)
            notes = [*self.notes, *problems]
            page = suite_page.render(
                self.title, f"{self.line}. {protocols[SEEN].line}", scores, film if film.exists() else None, notes
            )
            write_file(path / PAGE, page)
            about = {"suite": self.config.suite.name, "checkpoint": str(self.policy.folder), "notes": notes}
            records = {name: protocol.to_json() for name, protocol in protocols.items()}
            folder.write_result({**about, "protocols": records, **to_json(scores)})
        return scores

    @property
    def title(self) -> str:
        return f"{self.config.suite.name}: {self.policy.title}"

    @property
    def line(self) -> str:
        """Describes the evaluation."""
        count = self.config.suite.num_episodes
        return f"{count} episodes of each of {len(self.variants)} variants of {self.session.spec.id}"

    def _protocols(self) -> dict[str, Protocol]:
        count = self.config.suite.num_episodes
        return {
            variant.name: self.session.protocol(variant.spec, first_seed=variant.first_seed, num_episodes=count)
            for variant in self.variants
        }

    def _play(self, path: Path, message: Callable[[str], None]) -> tuple[list[RecordedEpisode], list[str]]:
        """Returns this session's recorded episodes with the names of their variants, and problems with recording."""
        count, films = self.config.suite.num_episodes, self.config.suite.num_films
        done = Counter(row["variant"] for row in read_rows(path / EPISODES))
        whole = {name for name, number in done.items() if number == count}
        keep_rows(path / EPISODES, lambda row: row["variant"] in whole)
        todo = [variant for variant in self.variants if variant.name not in whole]
        recorded: list[RecordedEpisode] = []
        problems: list[str] = []
        if not todo:
            return recorded, problems
        if whole:
            message(f"{len(whole)} variants were played before; {len(todo)} are left")
        with self.session:
            for variant in todo:
                played = self.session.play(
                    variant.spec,
                    first_seed=variant.first_seed,
                    num_episodes=count,
                    num_recorded=min(films, count),
                )
                append_rows(path / EPISODES, [_row(variant, end) for end in played.episodes])
                sync(path / EPISODES)
                message(_line(variant, played))
                recorded += [_named(episode, variant.name) for episode in played.recorded]
                problems += [problem for problem in played.problems if problem not in problems]
        return recorded, problems

    def _scores(self, path: Path) -> list[VariantScore]:
        rows = read_rows(path / EPISODES)
        scores: list[VariantScore] = []
        for variant in self.variants:
            ends = [_end(row) for row in rows if row["variant"] == variant.name]
            seen = scores[0].success_at_end if scores else None
            scores.append(score(variant.name, variant.axis, variant.about, ends, seen))
        return scores


def prepare(config: SuiteEvalConfig, path: Path) -> SuiteRun:
    """Creates every variant once.

    Args:
        path: the output folder.

    Raises: UserError that names the variant that cannot be created.
    """
    suite, checkpoint = config.suite, config.checkpoint
    policy = trained_policy(checkpoint, config)
    config, notes = film_if_possible(config, "suite")
    session = PolicySession(policy, num_episodes=suite.num_episodes, log_folder=path / "logs")
    if not session.interface.knows_success:
        raise UserError(
            f"suite={suite.name}: {session.spec.id} never says that an episode succeeded, and a suite compares success",
            hint="rlinf play shows its returns",
        )
    seen = Variant(
        name=SEEN,
        axis="",
        about="as in training, with the seeds of evaluations",
        spec=session.spec,
        first_seed=_first_seed(config, None),
    )
    variants = [_variant(name, variant, config, session) for name, variant in config.chosen.items()]
    return SuiteRun(
        config=config,
        policy=policy,
        session=session,
        variants=(seen, *variants),
        notes=(*session.notes, *notes),
    )


def _variant(name: str, variant: VariantConfig, config: SuiteEvalConfig, session: PolicySession) -> Variant:
    """Raises: UserError if it cannot be created, or the policy does not observe what it changes."""
    where = f"suite={config.suite.name}, variant {name!r}"
    hint = _without(name, config)
    env, disturbance = variant.env, _disturbance(variant.disturb)
    if disturbance is not None and (lacking := disturbance.lacking(session.reads)) is not None:
        raise UserError(f"{where} changes {lacking}, and the policy sees none", hint=hint)
    spec = replace(
        session.spec,
        id=env.id or session.spec.id,
        max_episode_steps=env.max_episode_steps or session.spec.max_episode_steps,
        options={**session.spec.options, **env.options},
        disturbance=disturbance,
    )
    try:
        session.check(spec)
    except UserError as error:
        raise UserError(f"{where}: {error.message}", hint=hint) from error
    first_seed = _first_seed(config, variant.first_seed)
    return Variant(name=name, axis=variant.axis, about=variant.about, spec=spec, first_seed=first_seed)


def _without(name: str, config: SuiteEvalConfig) -> str | None:
    """Returns a hint with the --only value that leaves out one of the chosen variants; None if no other is chosen. A
    complete axis stands for its variants."""
    others = config.chosen.keys() - {name}
    parts: list[str] = []
    for axis in AXES:
        variants = [one for one, variant in config.suite.variants.items() if variant.axis == axis]
        parts += [axis] if variants and others >= set(variants) else [one for one in variants if one in others]
    text = json.dumps(parts) if any("," in part for part in parts) else ",".join(parts)
    return f"leave it out: --only {shlex.quote(text)}" if parts else None


def _first_seed(config: SuiteEvalConfig, own: int | None) -> int:
    choices = (own, config.suite.first_seed, config.env.eval_seed)
    first_seed = next(seed for seed in choices if seed is not None)
    check_seeds(first_seed, config.suite.num_episodes, at="first_seed=")
    return first_seed


def _disturbance(config: DisturbConfig) -> Disturbance | None:
    disturbance = Disturbance(
        brightness=config.brightness,
        texture=config.texture,
        noise=config.noise,
        shift=config.shift,
        wordings=config.wordings,
        paraphrases=tuple(config.paraphrases.items()),
    )
    return disturbance if disturbance.changes_pictures or disturbance.changes_words else None


def _row(variant: Variant, end: EpisodeEnd) -> dict[str, Any]:
    return {"variant": variant.name, **asdict(end)}


def _end(row: dict[str, Any]) -> EpisodeEnd:
    return EpisodeEnd(**{name: value for name, value in row.items() if name != "variant"})


def _named(episode: RecordedEpisode, variant: str) -> RecordedEpisode:
    """Names an episode after its variant, so that the film has a row per variant."""
    return replace(episode, end=replace(episode.end, task=variant))


def _line(variant: Variant, played: Played) -> str:
    right = sum(bool(end.success_at_end) for end in played.episodes)
    return f"{variant.name}: {right} of {len(played.episodes)} episodes end in success"
