"""A task with problems from data files: a training stream, and sets for evaluation."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlinf.config.tasks import FilesTask, MixtureSource
from rlinf.errors import UserError
from rlinf.tasks.base import Sifted, TaskProblem
from rlinf.tasks.prompts import PromptEncoder, fit_prompts, template_of
from rlinf.tasks.published import published_set
from rlinf.tasks.questions import Columns, QuestionReader, load_problems

BLOCK = 1000
"""Problems of a mixture in which each source has exactly its share."""
SOURCE_COLUMN = "data_source"
"""Column of a row with the name of its source, as in verl's data."""


def read_problems(config: FilesTask, path: Path, read: QuestionReader, template: str) -> Sifted:
    """Returns the problems of a file, folder or data set as the task's settings say. Raises: UserError."""
    to_prompt = template_of(template, config.columns.prompt or "question")
    return load_problems(path, read, to_prompt, on_bad_row=config.on_bad_row)


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
            "eval_files": self._load(config.eval_files, config.eval_source or "")[: config.num_held_out],
            **{f"eval_sets.{name}": self._load([path], name, name) for name, path in config.eval_sets.items()},
        }
        training = {problem.prompt for problems in self._training.values() for problem in problems}
        for name, problems in self._evaluation.items():
            both = training & {problem.prompt for problem in problems}
            if both:
                raise UserError(
                    f"task.{name}: of its evaluation problems {len(both)} are in the training files too, for example "
                    f"{min(both)[:80]!r}",
                    hint="use separate files for training and evaluation",
                )
        self._counts = _shares({name: source.weight for name, source in config.sources.items()})
        self._block, self._names = -1, [""]
        self._orders: dict[str, tuple[int, list[int]]] = {}

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
        epoch, position = divmod(index, len(problems))
        if self._orders.get(name, (-1, []))[0] != epoch:
            order = list(range(len(problems)))
            random.Random(f"epoch {self._seed} {epoch}{name and f' {name}'}").shuffle(order)
            self._orders[name] = epoch, order
        return problems[self._orders[name][1][position]]

    def held_out(self) -> Mapping[str, list[TaskProblem]]:
        more = {name: self._evaluation[f"eval_sets.{name}"] for name in self._config.eval_sets}
        return {"": self._evaluation["eval_files"], **more}

    def all_problems(self) -> Iterator[TaskProblem]:
        """Yields the problems of all sets."""
        for problems in (*self._training.values(), *self._evaluation.values()):
            yield from problems

    def fingerprints(self) -> dict[str, str]:
        """Returns config key and files of each set -> digest of its problems in order."""
        config = self._config
        sets: dict[str, tuple[Sequence[Path], list[TaskProblem]]] = {
            f"mixture.{name}.files" if name else "train_files": (source.files, self._training[name])
            for name, source in config.sources.items()
        }
        sets["eval_files"] = config.eval_files, self._evaluation["eval_files"]
        for name, path in config.eval_sets.items():
            sets[f"eval_sets.{name}"] = (path,), self._evaluation[f"eval_sets.{name}"]
        digests = {}
        for name, (paths, problems) in sets.items():
            digest = hashlib.sha256()
            for problem in problems:
                digest.update(problem.fingerprint)
            digests[f"task.{name}={', '.join(map(str, paths))}"] = digest.hexdigest()
        return digests

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

    def _load_source(self, name: str, source: MixtureSource) -> list[TaskProblem]:
        problems = self._load(source.files, name, settings=source)
        if not self._config.drop_duplicates:
            return problems
        unique = {(problem.content, problem.answer): problem for problem in reversed(problems)}
        if len(unique) < len(problems):
            num_dropped = len(problems) - len(unique)
            self.notes.append(f"{num_dropped:,} of {len(problems):,} problems occur again and were dropped")
        return list(unique.values())[::-1]

    def _load(
        self, paths: Sequence[Path], source: str, published_name: str = "", settings: MixtureSource | None = None
    ) -> list[TaskProblem]:
        """The problems of files.

        Args:
            source: value of `SOURCE_COLUMN` for rows that have none; empty: they are left as they are.
            published_name: name of a published set, whose columns are used.
            settings: of a source of a mixture; None: those of the task.
        """
        config = self._config
        columns = (settings and settings.columns) or config.columns
        answer_format = (settings and settings.answer_format) or config.answer_format
        template = (settings and settings.prompt_template) or config.prompt_template
        published = published_set(published_name)
        read: QuestionReader = (
            published.read
            if published
            else Columns(
                question=columns.prompt,
                answer=columns.answer,
                needs_number=answer_format == "gsm8k",
                needs_answer=self._needs_answer,
            )
        )
        problems: list[TaskProblem] = []
        for path in paths:
            loaded = read_problems(config, path, read, template)
            problems += loaded.problems
            self.notes += loaded.notes
        if not source:
            return problems
        return [replace(problem, row={SOURCE_COLUMN: source, **problem.row}) for problem in problems]


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
