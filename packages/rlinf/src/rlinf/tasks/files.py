"""A task with problems from data files: a training stream, and sets for evaluation."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlinf.config.tasks import FilesTask, MixtureSource, RowSettings
from rlinf.errors import UserError
from rlinf.tasks.base import EpochOrder, TaskProblem, digest_of
from rlinf.tasks.pictures import PictureReading
from rlinf.tasks.prompts import PromptEncoder, fit_prompts, template_of
from rlinf.tasks.published import published_set
from rlinf.tasks.questions import Columns, load_problems
from rlinf.tasks.spooled import SpooledRows

BLOCK = 1000
"""Problems of a mixture in which each source has exactly its share."""
SOURCE_COLUMN = "data_source"
"""Column of a row with the name of its source, as in verl's data."""


def column_reader(settings: RowSettings, *, needs_answer: bool) -> Columns:
    """Returns the reader of rows that no published set describes."""
    return Columns(
        question=settings.columns.prompt,
        answer=settings.columns.answer,
        images=settings.columns.images,
        videos=settings.columns.videos,
        needs_number=settings.answer_format == "gsm8k",
        needs_answer=needs_answer,
    )


class FileProblems:
    """Problems from files. Every epoch visits the training rows of a source in a new order, which depends only on seed
    and epoch.

    Args:
        needs_answer: whether every row must have a reference answer.

    Raises: UserError for files that cannot be read, and for problems that are both in training and in evaluation.
    """

    alphabet = None

    def __init__(self, config: FilesTask, seed: int, *, needs_answer: bool = True) -> None:
        self._config, self._needs_answer = config, needs_answer
        self._seed = seed
        self.notes: list[str] = []
        self._training = {name: self._load_source(name, source) for name, source in config.sources.items()}
        self._evaluation = {
            "eval_files": self._load_evaluation(config) if config.eval_files else self._hold_out(config.num_held_out),
            **{f"eval_sets.{name}": self._load([path], name, name) for name, path in config.eval_sets.items()},
        }
        evaluated = {name: {problem.identity for problem in rows} for name, rows in self._evaluation.items()}
        everywhere = set().union(*evaluated.values())
        trained = {p.identity for problems in self._training.values() for p in problems if p.identity in everywhere}
        for name, identities in evaluated.items():
            if both := trained & identities:
                raise UserError(
                    f"task.{name}: of its evaluation problems {len(both)} are in the training files too, for example "
                    f"{min(both)[0][:80]!r}",
                    hint="use separate files for training and evaluation",
                )
        self._counts = _shares({name: source.weight for name, source in config.sources.items()})
        self._block, self._names = -1, [""]
        self._orders = {name: EpochOrder(seed, name) for name in config.sources}

    def fit(self, encoder: PromptEncoder, max_prompt_tokens: int) -> None:
        """Applies task.long_prompts to all problems; call it once, before the first problem is used.

        Raises: UserError if long prompts stop the run, or no problem is left.
        """
        for sets, prefix in ((self._training, "mixture."), (self._evaluation, "")):
            for name, problems in sets.items():
                fitted = fit_prompts(
                    problems,
                    encoder,
                    max_prompt_tokens=max_prompt_tokens,
                    long_prompts=self._config.long_prompts,
                    what=f"task.{prefix}{name}" if name else "task.train_files",
                )
                sets[name] = fitted.problems
                self.notes += fitted.notes

    @property
    def num_train_problems(self) -> int:
        """Number of different training problems."""
        return sum(map(len, self._training.values()))

    def train_problem(self, index: int) -> TaskProblem:
        name, index = self._source_at(index)
        problems = self._training[name]
        return problems[self._orders[name].place(index, len(problems))]

    def held_out(self) -> Mapping[str, Sequence[TaskProblem]]:
        more = {name: self._evaluation[f"eval_sets.{name}"] for name in self._config.eval_sets}
        return {"": self._evaluation["eval_files"], **more}

    def all_problems(self) -> Iterator[TaskProblem]:
        """Yields the problems of all sets."""
        for problems in (*self._training.values(), *self._evaluation.values()):
            yield from problems

    def fingerprints(self) -> dict[str, str]:
        """Returns config key and files of each set -> digest of its problems in order."""
        config = self._config
        sets: dict[str, tuple[Sequence[Path], Sequence[TaskProblem]]] = {
            f"mixture.{name}.files" if name else "train_files": (source.files, self._training[name])
            for name, source in config.sources.items()
        }
        sets["eval_files"] = config.eval_files, self._evaluation["eval_files"]
        for name, path in config.eval_sets.items():
            sets[f"eval_sets.{name}"] = (path,), self._evaluation[f"eval_sets.{name}"]
        return {
            f"task.{name}={', '.join(map(str, paths))}": digest_of(problems) for name, (paths, problems) in sets.items()
        }

    # -- inner -----------------------------------------------------------------------------------------------------

    def _source_at(self, index: int) -> tuple[str, int]:
        """The source of a problem of the stream, and its index among the problems of that source."""
        if len(self._counts) == 1:
            return next(iter(self._counts)), index
        block, position = divmod(index, BLOCK)
        if block != self._block:
            names = [name for name, count in self._counts.items() for _ in range(count)]
            random.Random(f"mixture {self._seed} {block}").shuffle(names)
            self._block, self._names = block, names
        name = self._names[position]
        return name, block * self._counts[name] + self._names[:position].count(name)

    def _load_source(self, name: str, source: MixtureSource) -> SpooledRows[TaskProblem]:
        problems = self._load(source.files, name, settings=self._config.row_settings(source))
        if not self._config.drop_duplicates:
            return problems
        unique: dict[bytes, int] = {}
        for place in reversed(range(len(problems))):
            problem = problems[place]
            unique[hashlib.sha256(repr((problem.content, problem.answer, *problem.identity[1:])).encode()).digest()] = (
                place
            )
        if len(unique) < len(problems):
            num_dropped = len(problems) - len(unique)
            self.notes.append(f"{num_dropped:,} of {len(problems):,} problems occur again and were dropped")
        return problems.subset(list(unique.values())[::-1])

    def _load_evaluation(self, config: FilesTask) -> SpooledRows[TaskProblem]:
        problems, count = self._load(config.eval_files, config.eval_source or ""), config.num_held_out
        if len(problems) > count:
            self.notes.append(
                f"task.eval_files: the first {count:,} of {len(problems):,} problems are used (task.num_held_out)"
            )
        return problems[:count]

    def _hold_out(self, most: int) -> SpooledRows[TaskProblem]:
        """Takes random problems out of training, at most a tenth of all; those that occur again go with them.

        Raises: UserError if there are too few.
        """
        identities = sorted({problem.identity for problems in self._training.values() for problem in problems})
        count = min(most, -(-len(identities) // 10))
        chosen = set(random.Random(f"held out {self._seed}").sample(identities, count))
        held_out: list[SpooledRows[TaskProblem]] = []
        for name, problems in self._training.items():
            is_chosen = [problem.identity in chosen for problem in problems]
            held_out.append(problems.subset(place for place, goes in enumerate(is_chosen) if goes))
            self._training[name] = problems.subset(place for place, goes in enumerate(is_chosen) if not goes)
            if not self._training[name]:
                source = f"task.mixture.{name}.files" if name else "task.train_files"
                raise UserError(
                    f"task.eval_files is empty, and {source} has too few problems to hold some out",
                    hint="give other files with --task.eval_files",
                )
        self.notes.append(
            f"task.eval_files is empty: {count:,} of {len(identities):,} training problems are held out to evaluate on"
        )
        return _each_once(SpooledRows.joined(held_out))

    def _load(
        self, paths: Sequence[Path], source: str, published_name: str = "", settings: RowSettings | None = None
    ) -> SpooledRows[TaskProblem]:
        """The problems of files.

        Args:
            source: value of `SOURCE_COLUMN` for rows that have none; empty: they are left as they are.
            published_name: name of a published set, whose columns are used.
            settings: None: those of the task.
        """
        settings = settings or self._config.row_settings()
        published = published_set(published_name)
        read = published.read if published else column_reader(settings, needs_answer=self._needs_answer)
        to_prompt = template_of(settings.prompt_template, settings.placeholder)
        parts: list[SpooledRows[TaskProblem]] = []
        for path in paths:
            loaded = load_problems(
                path,
                read,
                to_prompt,
                on_bad_row=self._config.on_bad_row,
                reading=PictureReading.as_set(self._config),
            )
            named = (replace(one, row={SOURCE_COLUMN: source, **one.row}) for one in loaded.problems)
            parts.append(SpooledRows(named) if source else loaded.problems)
            self.notes += loaded.notes
        return SpooledRows.joined(parts)


def _each_once(problems: SpooledRows[TaskProblem]) -> SpooledRows[TaskProblem]:
    """The first problem with each prompt and its pictures."""
    first: dict[tuple[str, ...], int] = {}
    for place, problem in enumerate(problems):
        first.setdefault(problem.identity, place)
    return problems.subset(first.values())


def _shares(weights: Mapping[str, float]) -> dict[str, int]:
    """Returns the number of problems of each source in a block, by largest remainders.

    Raises: UserError for a source that would have none.
    """
    total = sum(weights.values())
    exact = {name: BLOCK * weight / total for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: BLOCK - sum(counts.values())]:
        counts[name] += 1
    for name, count in counts.items():
        if count == 0:
            raise UserError(
                f"task.mixture.{name}.weight={weights[name]:g} is less than a thousandth of all weights",
                hint="leave the source out, or give it more weight",
            )
    return counts
