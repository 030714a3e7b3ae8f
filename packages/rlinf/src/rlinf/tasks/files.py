"""Problems from data files: a training stream, and sets for evaluation."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError
from rlinf.tasks.base import Problem
from rlinf.tasks.prompts import PromptEncoder, fit_prompts, template_of
from rlinf.tasks.published import published_set
from rlinf.tasks.questions import Columns, QuestionReader, load_problems


class FileProblems:
    """Every epoch goes through the training rows in a new order, which depends on the seed and the epoch alone."""

    alphabet = None

    def __init__(self, config: FilesTask, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._notes: list[str] = []
        self._train = self._load(config.train_files)
        self._eval = self._load(config.eval_files)[: config.num_held_out]
        self._more = {name: self._load([path], name) for name, path in config.eval_sets.items()}
        for name, problems in {"eval_files": self._eval, **self._more}.items():
            self._refuse_overlap(name, problems)
        self._epoch = -1
        self._order: list[int] = []

    @property
    def notes(self) -> Sequence[str]:
        return self._notes

    def fit(self, encoder: PromptEncoder, max_prompt_tokens: int) -> None:
        """Applies task.long_prompts to all problems; once, before the first is asked for.

        Raises: UserError where long prompts stop the run, or nothing is left.
        """
        self._train = self._fitted(self._train, encoder, max_prompt_tokens, "task.train_files")
        self._eval = self._fitted(self._eval, encoder, max_prompt_tokens, "task.eval_files")
        for name, problems in self._more.items():
            self._more[name] = self._fitted(problems, encoder, max_prompt_tokens, f"task.eval_sets.{name}")

    def train_problem(self, index: int) -> Problem:
        epoch, position = divmod(index, len(self._train))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._train)))
            random.Random(f"epoch {self._seed} {epoch}").shuffle(self._order)
        return self._train[self._order[position]]

    def held_out(self) -> list[Problem]:
        return self._eval

    def more_held_out(self) -> Mapping[str, list[Problem]]:
        return self._more

    # -- inner -----------------------------------------------------------------------------------------------------

    def _load(self, paths: Sequence[Path], name: str = "") -> list[Problem]:
        config = self._config
        known = published_set(name)
        needs_number = config.answer_format == "gsm8k"
        own = Columns(question=config.prompt_field, answer=config.answer_field, needs_number=needs_number)
        read: QuestionReader = known.read if known else own
        to_prompt = template_of(config.prompt_template, config.prompt_field)
        problems: list[Problem] = []
        for path in paths:
            loaded = load_problems(path, read, to_prompt, on_bad_row=config.on_bad_row)
            problems += loaded.problems
            self._notes += loaded.notes
        return problems

    def _fitted(
        self, problems: list[Problem], encoder: PromptEncoder, max_prompt_tokens: int, what: str
    ) -> list[Problem]:
        long_prompts = self._config.long_prompts
        fitted = fit_prompts(
            problems, encoder, max_prompt_tokens=max_prompt_tokens, long_prompts=long_prompts, what=what
        )
        self._notes += fitted.notes
        return fitted.problems

    def _refuse_overlap(self, name: str, problems: Sequence[Problem]) -> None:
        both = {problem.prompt for problem in self._train} & {problem.prompt for problem in problems}
        if both:
            raise UserError(
                f"task.{name if name == 'eval_files' else f'eval_sets.{name}'}: of its evaluation problems "
                f"{len(both)} are in the training files too, for example {min(both)[:80]!r}",
                hint="use separate files for training and evaluation",
            )
