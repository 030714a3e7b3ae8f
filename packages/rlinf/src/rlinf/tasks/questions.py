"""Turns rows into problems: reads question and answer columns and checks rows.

`Columns` is for custom files; published sets have their own readers (published.py).
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from rlinf.errors import UserError
from rlinf.tasks.base import SYSTEM_ROLES, Sifted, TaskProblem, Turns
from rlinf.tasks.file_content import lines_command, rows_within
from rlinf.tasks.pictures import DEFAULT_READING, PictureReading, without_pictures
from rlinf.tasks.row_files import read_rows
from rlinf.tasks.row_pictures import (
    NO_PICTURES,
    ColumnName,
    RowPictures,
    marker_of_part,
    new_parts,
    pictures_columns,
    pictures_of_row,
    place_pictures,
)
from rlinf.tasks.row_values import (
    ColumnError,
    RowError,
    absent,
    column_of,
    is_list,
    prompt_of,
    text_of,
    value_at,
)
from rlinf.tasks.rows import BadRow, Row, listed
from rlinf.tasks.spooled import SpooledRows

T = TypeVar("T")

MAX_SHOWN = 5
"""Maximum number of bad rows in a message."""
MAX_CHARACTERS = 1 << 22
"""Maximum length of a problem, about a million tokens; tokenizers need 200 times the memory of a text."""

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "conversations", "query", "instruction", "input", "text")
ANSWER_COLUMNS = ("answer", "ground_truth", "reward_model.ground_truth", "final_answer", "expected_answer", "solution")
"""Names of the columns of problem and answer, for data whose columns are not named by the settings."""
FURTHER_ANSWERS = ("completion", "response", "output", "target", "label", "reference")
"""Columns that may be the answer, so that a message names them."""
ROLES = {"human": "user", "gpt": "assistant"}
"""Role of a turn in the format of ShareGPT -> role in chat templates."""
TOOL_ROLES = ("tool", "function", "observation", "ipython", "environment", "context", "documents")
TEXT_PARTS = ("text", "input_text")
"""Types of the parts of a turn that are text."""
KNOWN_ROLES = (*SYSTEM_ROLES, "user", "assistant", *TOOL_ROLES, *ROLES)
"""Roles that published chat templates have; one that is misspelt would be rendered as it is."""
_MARKED_NUMBER, MAX_MARKED = re.compile(r"####\s*-?[0-9]+\s*\Z"), 40
"""The usual end of an answer of GSM8K, and the characters in which it is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The question and the right answer of a row."""

    text: str
    answer: str
    turns: Turns = ()
    """The question as a chat; then `text` holds all its turns."""
    pictures: RowPictures = NO_PICTURES
    """Its pictures and videos."""


QuestionReader = Callable[[Mapping[str, Any]], Question]
"""Raises RowError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Reads question and answer from two columns. A question is text, or the turns of a chat: a last turn of the
    assistant is the answer where no column is."""

    question: str | None
    """Name of a column, `outer.inner` for one inside another; None: the first of `PROMPT_COLUMNS` that the row has."""
    answer: str | None
    """The same, of `ANSWER_COLUMNS`."""
    images: ColumnName = False
    """The same, of `pictures.COLUMNS`, a column with one picture or a list; False: columns of pictures are not read."""
    videos: ColumnName = False
    """The same, of `pictures.VIDEO_COLUMNS`."""
    needs_number: bool = False
    """Whether the answer must contain a number, as GSM8K's `#### 42`."""
    needs_answer: bool = True
    """Whether a row without an answer is a bad row."""
    keys: tuple[str, str] = ("task.columns.prompt", "task.columns.answer")
    """The settings that name the two columns."""

    def __call__(self, values: Mapping[str, Any]) -> Question:
        question = column_of(values, self.question, PROMPT_COLUMNS)
        answer = column_of(values, self.answer, ANSWER_COLUMNS, is_needed=self.answer is not None)
        assert question is not None, "it is needed"
        value, parts = value_at(values, question), new_parts(self)
        if not is_list(value):
            text, pictures = prompt_of(values, question), pictures_of_row(values, None, self)
            return Question(text=text, answer=self._answer_of(values, question, answer, None), pictures=pictures)
        turns, last = turns_of(value, question, parts)
        if last is not None and answer is not None and question.casefold() == "prompt":
            raise RowError(
                f"field {question!r}: the chat ends with a turn of the assistant, and {answer!r} is the answer; remove "
                "that turn from the prompt"
            )
        return Question(
            text=dialogue_of(turns),
            answer=self._answer_of(values, question, answer, last),
            turns=turns,
            pictures=pictures_of_row(values, parts, self),
        )

    def _answer_of(self, values: Mapping[str, Any], question: str, answer: str | None, last: str | None) -> str:
        """The answer in a column, or the last turn of the assistant; empty where there is none and none is needed."""
        if answer is not None:
            text = text_of(values, answer)
            if self.answer is None and answer.casefold() == "solution":
                from rlinf_algos.rewards import last_boxed

                text = last_boxed(text) or text
        elif last is not None:
            text = last
        elif self.needs_answer:
            raise ColumnError(absent(values, ANSWER_COLUMNS))
        else:
            text = ""
        if self.needs_number:
            check_number(text, answer or question)
        return text

    def columns_of(self, values: Mapping[str, Any]) -> dict[str, str | None]:
        """Returns the names of the columns of prompt and answer in a row, None for one that it does not have, and of
        the pictures and videos if it has some."""
        columns = {
            "prompt": column_of(values, self.question, PROMPT_COLUMNS, is_needed=False),
            "answer": column_of(values, self.answer, ANSWER_COLUMNS, is_needed=False),
        }
        return columns | pictures_columns(values, self)

    def hint(self, values: Mapping[str, Any]) -> str | None:
        """Returns a hint for rows whose columns have other names; None if both columns exist."""
        columns = self.columns_of(values)
        recognized = (columns["prompt"], columns["answer"])
        names = {str(name): str(name).casefold() for name in values if name not in recognized}
        flags = []
        usual = (PROMPT_COLUMNS, (*ANSWER_COLUMNS, *FURTHER_ANSWERS))
        for key, column, words in zip(self.keys, recognized, usual, strict=True):
            if column is not None:
                continue
            likely = [name for word in words for name in names if names[name] == word]
            likely += [name for name in names if any(word in names[name] for word in words)]
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
    reading: PictureReading = DEFAULT_READING,
) -> Sifted:
    """Reads all problems of a file, in order.

    Args:
        to_prompt: the template, which turns a question into a prompt.
        on_bad_row: stop: raise an error that lists the first bad rows; skip: count them in a note.
        bad_row_key: name of the setting, for messages.
        reading: how their pictures and videos are read.
    Raises: UserError.
    """
    loaded = load_rows(
        path,
        lambda row: _problem(row, read, to_prompt, reading),
        on_bad_row=on_bad_row,
        bad_row_key=bad_row_key,
        what="problem",
        hint_of=read.hint if isinstance(read, Columns) else lambda values: None,
    )
    return Sifted(problems=loaded.items, num_found=loaded.num_bad, notes=loaded.notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRows(Generic[T]):
    """What was read of the rows of a file."""

    items: SpooledRows[T]
    first: Mapping[str, Any]
    """All columns of the first of them."""
    num_bad: int
    """Bad rows that were skipped."""
    notes: tuple[str, ...]
    """Notes for the user about them."""


def load_rows(
    path: Path,
    read: Callable[[Row], T],
    *,
    on_bad_row: Literal["stop", "skip"],
    bad_row_key: str,
    what: str,
    hint_of: Callable[[Mapping[str, Any]], str | None],
) -> LoadedRows[T]:
    """Reads all rows of a file, in order.

    Args:
        read: raises RowError for a row that it cannot use.
        on_bad_row, bad_row_key: as in `load_problems`.
        what: what a row is, for messages.
        hint_of: what to do if no row has the columns that are needed, by the values of one; None: nothing.
    Raises: UserError.
    """
    items: SpooledRows[T] = SpooledRows()
    first: Row | None = None
    bad: list[BadRow] = []
    without_columns: Row | None = None
    for row in read_rows(path):
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        try:
            items.append(read(row))
            first = first or row
        except RowError as error:
            bad.append(BadRow(number=row.number, place=row.place, what=str(error)))
            if isinstance(error, ColumnError):
                without_columns = without_columns or row
    hint = None
    if without_columns is not None and first is None:
        hint = _columns_hint(path, without_columns.values, hint_of, is_only_row=len(bad) == 1)
    if bad and on_bad_row == "stop":
        more = [f"and {len(bad) - MAX_SHOWN} more bad rows in that file"] if len(bad) > MAX_SHOWN else []
        raise UserError(
            "\n".join([*map(str, bad[:MAX_SHOWN]), *more]),
            hint=hint or f"fix the file, or leave bad rows out and count them with --{bad_row_key} skip",
        )
    if first is None:
        why = f"all {len(bad)} rows are bad, the first: {bad[0]}" if bad else "it has no row"
        raise UserError(f"{path}: holds no {what}; {why}", hint=hint or "is it the right file?")
    notes = (f"{path}: {len(bad)} bad rows were skipped, the first is {bad[0]}",) if bad else ()
    return LoadedRows(items=items, first=first.values, num_bad=len(bad), notes=notes)


def _columns_hint(
    path: Path,
    values: Mapping[str, Any],
    hint_of: Callable[[Mapping[str, Any]], str | None],
    *,
    is_only_row: bool,
) -> str | None:
    """What to do with a file whose rows lack a column."""
    if is_only_row and (inner := rows_within(values)):
        return f"the rows are in its list {inner!r}; write them with an object a line: {lines_command(path, inner)}"
    hint = hint_of(values)
    if hint is not None and path.suffix.lower() == ".csv":
        return f"{hint}; the first line of a CSV file names the columns"
    return hint


def turns_of(value: Sequence[Any], name: str, pictures: list[Any] | None = None) -> tuple[Turns, str | None]:
    """Returns the turns of a chat up to the last that is not the assistant's, and the assistant's answer to them.

    Args:
        value, pictures: as in `all_turns_of`.
        name: the column, for messages.
    Raises: RowError.
    """
    turns = list(all_turns_of(value, name, pictures))
    last = turns.pop()[1] if turns and turns[-1][0] == "assistant" else None
    if not turns or turns[-1][0] in (*SYSTEM_ROLES, "assistant"):
        raise RowError(f"field {name!r}: the chat asks nothing: it has no turn of a user")
    return tuple(turns), last


def all_turns_of(value: Sequence[Any], name: str, pictures: list[Any] | None = None) -> Turns:
    """Returns all turns of a chat, with a marker for each picture.

    Args:
        value: turns with `role` and `content`, whose content may be a list of parts of type "text" or a picture's, or
            with `from` and `value`.
        name: the column, for messages.
        pictures: gets each picture's part; None: pictures are refused.
    Raises: RowError.
    """
    turns: list[tuple[str, str]] = []
    for number, turn in enumerate(value, start=1):
        if not isinstance(turn, Mapping):
            raise RowError(f"field {name!r}: turn {number} must be an object, is {json.dumps(turn, default=str)[:60]}")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str):
            raise RowError(f"field {name!r}: turn {number} has no role; it has {listed(sorted(map(str, turn)))}")
        if role not in KNOWN_ROLES:
            close = difflib.get_close_matches(role.casefold(), KNOWN_ROLES, n=1)
            meant = f"did you mean {close[0]!r}?" if close else f"known are {listed(KNOWN_ROLES)}"
            raise RowError(f"field {name!r}: turn {number} has the role {role!r}; {meant}")
        if is_list(content):
            content = "".join(_text_of_part(part, f"field {name!r}: turn {number}", pictures) for part in content)
        if not isinstance(content, str) or not content.strip():
            raise RowError(f"field {name!r}: turn {number}, of the {role}, has no text")
        turns.append((ROLES.get(role, role), content))
    return tuple(turns)


def _text_of_part(part: Any, where: str, pictures: list[Any] | None) -> str:
    """The text of a part of a turn; of a picture its marker. Raises: RowError."""
    kind = str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return part["text"]
    if pictures is not None and (marker := marker_of_part(part)):
        pictures.append(part)
        return marker
    raise RowError(f"{where} has parts of type {kind!r}" + (" without a text" if kind in TEXT_PARTS else ""))


def dialogue_of(turns: Turns) -> str:
    """Returns a chat as text, for people and rewards to read."""
    return turns[0][1] if len(turns) == 1 else "\n\n".join(f"{role}: {content}" for role, content in turns)


def check_number(answer: str, name: str) -> None:
    """Raises: RowError if `rlinf_algos.rewards.final_number` finds no number."""
    from rlinf_algos.rewards import final_number

    if len(answer) > MAX_CHARACTERS:
        raise RowError(
            f"the {name} has {len(answer):,} characters; a number is looked for in at most {MAX_CHARACTERS:,}"
        )
    if not _MARKED_NUMBER.search(answer[-MAX_MARKED:]) and final_number(answer) is None:
        raise RowError(f"the {name} holds no number: {answer[-80:]!r}; it should end like `#### 42`")


def _problem(row: Row, read: QuestionReader, to_prompt: Callable[[str], str], reading: PictureReading) -> TaskProblem:
    """Raises: RowError."""
    question = read(row.values)
    if len(question.text) > MAX_CHARACTERS:
        raise RowError(f"the problem has {len(question.text):,} characters; at most {MAX_CHARACTERS:,} are read")
    problem = TaskProblem(
        prompt=question.text if question.turns else to_prompt(question.text),
        turns=question.turns,
        answer=question.answer,
        place=row.place,
        number=row.number,
        row=row.values,
    )
    if not question.pictures:
        return problem
    prompt, turns, pictures = place_pictures(problem.prompt, problem.turns, question.pictures, row, reading)
    text = dialogue_of(turns) if turns else prompt
    assert text is not None, "a problem has a prompt"
    return replace(problem, prompt=text, turns=turns, pictures=pictures, row=without_pictures(problem.row))
