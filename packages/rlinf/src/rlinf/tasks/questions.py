"""Turns rows into problems: reads question and answer columns and checks rows.

`Columns` is for custom files; published sets have their own readers (published.py).
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlinf.errors import UserError
from rlinf.tasks.base import Sifted, TaskProblem
from rlinf.tasks.row_files import BadRow, Row, listed, read_rows

MAX_SHOWN = 5
"""Maximum number of bad rows in a message."""
MAX_CHARACTERS = 1 << 22
"""Maximum length of a problem, about a million tokens; tokenizers need 200 times the memory of a text."""

USUAL_NAMES = (
    ("prompt", "question", "problem", "query", "instruction", "input", "text"),
    ("answer", "ground_truth", "solution", "completion", "response", "output", "target", "label", "reference"),
)
"""Names of problem and answer columns, most common first."""


class RowError(ValueError):
    """An invalid row; `load_problems` adds the place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The question and the right answer of a row."""

    text: str
    answer: str


QuestionReader = Callable[[Mapping[str, Any]], Question]
"""Raises RowError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Reads question and answer from two columns."""

    question: str
    answer: str
    needs_number: bool = False
    """Whether the answer must contain a number, as GSM8K's `#### 42`."""
    keys: tuple[str, str] = ("task.prompt_field", "task.answer_field")
    """The settings that name the two columns."""

    def __call__(self, values: Mapping[str, Any]) -> Question:
        missing = [name for name in (self.question, self.answer) if name not in values]
        if missing:
            raise RowError(f"no field {listed(missing)}; the row has {listed(sorted(map(str, values)))}")
        question, answer = text_of(values, self.question), text_of(values, self.answer)
        if self.needs_number:
            check_number(answer, self.answer)
        return Question(text=question, answer=answer)

    def hint(self, values: Mapping[str, Any]) -> str | None:
        """Returns a hint for rows whose columns have other names; None if both columns exist."""
        names = {str(name): str(name).casefold() for name in values if name not in (self.question, self.answer)}
        flags = []
        for key, column, usual in zip(self.keys, (self.question, self.answer), USUAL_NAMES, strict=True):
            if column in values:
                continue
            likely = [name for word in usual for name in names if names[name] == word]
            likely += [name for name in names if any(word in names[name] for word in usual)]
            likely += list(names)[:1] if len(names) == 1 else []
            flags.append(f"--{key} {shlex.quote((likely or ['COLUMN'])[0])}")
            names = {name: folded for name, folded in names.items() if name not in likely[:1]}
        if not flags or len(values) < 2:
            return None
        return f"say which columns of the file hold problem and answer: {' '.join(flags)}"


def load_problems(
    path: Path,
    read: QuestionReader,
    to_prompt: Callable[[str], str],
    *,
    on_bad_row: Literal["stop", "skip"],
    bad_row_key: str = "task.on_bad_row",
) -> Sifted:
    """Reads all problems of a file, in order.

    Args:
        to_prompt: the template, which turns a question into a prompt.
        on_bad_row: stop: raise an error that lists the first bad rows; skip: count them in a note.
        bad_row_key: name of the setting, for messages.
    Raises: UserError.
    """
    problems: list[TaskProblem] = []
    bad: list[BadRow] = []
    first: Row | None = None
    for row in read_rows(path):
        first = row if first is None and isinstance(row, Row) else first
        parsed = row if isinstance(row, BadRow) else _problem(row, read, to_prompt)
        if isinstance(parsed, TaskProblem):
            problems.append(parsed)
        else:
            bad.append(parsed)
    hint = read.hint(first.values) if isinstance(read, Columns) and first is not None and not problems else None
    if bad and on_bad_row == "stop":
        more = [f"and {len(bad) - MAX_SHOWN} more bad rows in that file"] if len(bad) > MAX_SHOWN else []
        raise UserError(
            "\n".join([*map(str, bad[:MAX_SHOWN]), *more]),
            hint=hint or f"mend the file, or leave bad rows out and count them with --{bad_row_key} skip",
        )
    if not problems:
        why = f"; all {len(bad)} rows are bad, the first: {bad[0]}" if bad else ""
        raise UserError(f"{path}: holds no problem{why}", hint=hint or "is it the right file?")
    notes = (f"{path}: {len(bad)} bad rows were skipped, the first is {bad[0]}",) if bad else ()
    return Sifted(problems=problems, num_found=len(bad), notes=notes)


# -- values of a row -----------------------------------------------------------------------------------------------


def text_of(values: Mapping[str, Any], name: str) -> str:
    """Returns a value as non-empty text.

    Raises: RowError for anything but text and finite numbers.
    """
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"field {name!r} must be text or a number, is {json.dumps(value, default=str)[:60]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"field {name!r} is {value}, no finite number")
    text = str(value)
    if not text.strip():
        raise RowError(f"field {name!r} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"field {name!r} holds {text[error.start]!r}, which is half of a character") from None
    return text


def check_number(answer: str, name: str) -> None:
    """Raises: RowError if `rlinf_algos.rewards.final_number` finds no number."""
    from rlinf_algos.rewards import final_number

    if len(answer) > MAX_CHARACTERS:
        raise RowError(
            f"the {name} has {len(answer):,} characters; a number is looked for in at most {MAX_CHARACTERS:,}"
        )
    if final_number(answer) is None:
        raise RowError(f"the {name} holds no number: {answer[-80:]!r}; it should end like `#### 42`")


def _problem(row: Row, read: QuestionReader, to_prompt: Callable[[str], str]) -> TaskProblem | BadRow:
    try:
        question = read(row.values)
    except RowError as error:
        return BadRow(number=row.number, place=row.place, what=str(error))
    if len(question.text) > MAX_CHARACTERS:
        what = f"the problem has {len(question.text):,} characters; at most {MAX_CHARACTERS:,} are read"
        return BadRow(number=row.number, place=row.place, what=what)
    return TaskProblem(
        prompt=to_prompt(question.text), answer=question.answer, place=row.place, number=row.number, row=row.values
    )
