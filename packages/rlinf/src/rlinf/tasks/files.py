"""A task with problems from data files: a training stream, and sets for evaluation."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError
from rlinf.tasks.base import Sifted, TaskProblem
from rlinf.tasks.prompts import PromptEncoder, fit_prompts, template_of
from rlinf.tasks.published import published_set
from rlinf.tasks.questions import Columns, QuestionReader, load_problems


def read_problems(config: FilesTask, source: Path, read: QuestionReader) -> Sifted:
    """Returns the problems of a source as the task's settings say. Raises: UserError."""
    to_prompt = template_of(config.prompt_template, config.columns.prompt or "question")
    return load_problems(source, read, to_prompt, on_bad_row=config.on_bad_row)


class FileProblems:
    """Problems from files. Every epoch visits the training rows in a new order, which depends only on seed and
    epoch."""

    alphabet = None

    def __init__(self, config: FilesTask, seed: int, *, needs_answer: bool = True) -> None:
        self._config, self._needs_answer = config, needs_answer
        self._seed = seed
        self.notes: list[str] = []
        self._sets = {
            "train_files": self._load(config.train_files),
            "eval_files": self._load(config.eval_files)[: config.num_held_out],
            **{f"eval_sets.{name}": self._load([path], name) for name, path in config.eval_sets.items()},
        }
        training = {problem.prompt for problem in self._sets["train_files"]}
        for name, problems in self._sets.items():
            both = training & {problem.prompt for problem in problems}
            if both and name != "train_files":
                raise UserError(
                    f"task.{name}: of its evaluation problems {len(both)} are in the training files too, for example "
                    f"{min(both)[:80]!r}",
                    hint="use separate files for training and evaluation",
                )
        self._epoch = -1
        self._order: list[int] = []

    def fit(self, encoder: PromptEncoder, max_prompt_tokens: int) -> None:
        """Applies task.long_prompts to all problems; call it once, before the first problem is used.

        Raises: UserError if long prompts stop the run, or no problem is left.
        """
        limit, long_prompts = max_prompt_tokens, self._config.long_prompts
        for name, problems in self._sets.items():
            fitted = fit_prompts(
                problems, encoder, max_prompt_tokens=limit, long_prompts=long_prompts, what=f"task.{name}"
            )
            self._sets[name] = fitted.problems
            self.notes += fitted.notes

    @property
    def num_train_problems(self) -> int:
        """Number of problems of an epoch."""
        return len(self._sets["train_files"])

    def train_problem(self, index: int) -> TaskProblem:
        problems = self._sets["train_files"]
        epoch, position = divmod(index, len(problems))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(problems)))
            random.Random(f"epoch {self._seed} {epoch}").shuffle(self._order)
        return problems[self._order[position]]

    def held_out(self) -> Mapping[str, list[TaskProblem]]:
        more = {name: self._sets[f"eval_sets.{name}"] for name in self._config.eval_sets}
        return {"": self._sets["eval_files"], **more}

    def fingerprints(self) -> dict[str, str]:
        """Returns config key and files of each set -> digest of its problems in order."""
        config = self._config
        files = {"train_files": config.train_files, "eval_files": config.eval_files}
        files |= {f"eval_sets.{name}": (path,) for name, path in config.eval_sets.items()}
        digests = {}
        for name, paths in files.items():
            digest = hashlib.sha256()
            for problem in self._sets[name]:
                digest.update(problem.fingerprint)
            digests[f"task.{name}={', '.join(map(str, paths))}"] = digest.hexdigest()
        return digests

    def _load(self, paths: Sequence[Path], name: str = "") -> list[TaskProblem]:
        config = self._config
        published = published_set(name)
        needs_number = config.answer_format == "gsm8k"
        columns = Columns(
            question=config.columns.prompt,
            answer=config.columns.answer,
            needs_number=needs_number,
            needs_answer=self._needs_answer,
        )
        read: QuestionReader = published.read if published else columns
        problems: list[TaskProblem] = []
        for path in paths:
            loaded = read_problems(config, path, read)
            problems += loaded.problems
            self.notes += loaded.notes
        return self._unique(problems) if config.drop_duplicates and not name else problems

    def _unique(self, problems: Sequence[TaskProblem]) -> list[TaskProblem]:
        unique = {(problem.content, problem.answer): problem for problem in reversed(problems)}
        if len(unique) < len(problems):
            self.notes.append(
                f"{len(problems) - len(unique):,} of {len(problems):,} problems occur again and were dropped"
            )
        return list(unique.values())[::-1]
