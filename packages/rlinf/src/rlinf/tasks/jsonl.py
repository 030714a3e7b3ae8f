"""Problems from JSON-lines files, GSM8K for example."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from rlinf.config.inputs import iter_jsonl
from rlinf.config.schema import JsonlTask
from rlinf.errors import UserError
from rlinf.tasks.base import Problem
from rlinf_algos.rewards import final_number


class JsonlProblems:
    """Every epoch goes through the training rows in a new order, which depends on the seed and the epoch alone."""

    alphabet = None
    same_length = False

    def __init__(self, config: JsonlTask, seed: int) -> None:
        self._seed = seed
        self._train = _read(config, "train_files")
        self._eval = _read(config, "eval_files")[: config.num_held_out]
        both = {problem.prompt for problem in self._train} & {problem.prompt for problem in self._eval}
        if both:
            raise UserError(
                f"of the evaluation problems {len(both)} are in the training files too, for example {min(both)[:80]!r}",
                hint="use separate files for task.train_files and task.eval_files",
            )
        self._epoch = -1
        self._order: list[int] = []

    def train_problem(self, index: int) -> Problem:
        epoch, position = divmod(index, len(self._train))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._train)))
            random.Random(f"epoch {self._seed} {epoch}").shuffle(self._order)
        return self._train[self._order[position]]

    def held_out(self) -> list[Problem]:
        return self._eval


def _read(config: JsonlTask, files: str) -> list[Problem]:
    problems = [
        _problem(config, row, f"{path}, problem {number}")
        for path in getattr(config, files)
        for number, row in enumerate(iter_jsonl(path, (config.prompt_field, config.answer_field)), start=1)
    ]
    if not problems:
        raise UserError(f"task.{files} holds no problem: {[str(path) for path in getattr(config, files)]}")
    return problems


def _problem(config: JsonlTask, row: Mapping[str, Any], place: str) -> Problem:
    answer = str(row[config.answer_field])
    if config.answer_format == "gsm8k" and final_number(answer) is None:
        raise UserError(
            f"{place}: the {config.answer_field} holds no number: {answer[-80:]!r}",
            hint="task.answer_format=gsm8k wants answers that end in `#### 42`",
        )
    prompt = config.prompt_template.format(**{config.prompt_field: row[config.prompt_field]})
    return Problem(prompt=prompt, answer=answer)
