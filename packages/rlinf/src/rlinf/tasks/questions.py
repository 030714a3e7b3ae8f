"""Turns rows into problems: reads question and answer columns and checks rows.

`Columns` is for custom files; published sets have their own readers (published.py).
"""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeGuard, TypeVar

from rlinf.errors import UserError
from rlinf.tasks.base import SYSTEM_ROLES, Sifted, TaskProblem, Turns
from rlinf.tasks.file_content import lines_command, rows_within
from rlinf.tasks.pictures import COLUMNS, HOLDERS, MARKER, PictureError, ProblemPicture, read_picture, without_pictures
from rlinf.tasks.row_files import read_rows
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
TEXT_PARTS, PICTURE_PARTS = ("text", "input_text"), ("image", "image_url", "input_image")
"""Types of the parts of a turn."""
KNOWN_ROLES = (*SYSTEM_ROLES, "user", "assistant", *TOOL_ROLES, *ROLES)
"""Roles that published chat templates have; one that is misspelt would be rendered as it is."""
_MARKED_NUMBER, MAX_MARKED = re.compile(r"####\s*-?[0-9]+\s*\Z"), 40
"""The usual end of an answer of GSM8K, and the characters in which it is looked for."""
_CHAT_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")


class RowError(ValueError):
    """An invalid row; `load_problems` adds the place."""


class ColumnError(RowError):
    """A row without a column that is needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The question and the right answer of a row."""

    text: str
    answer: str
    turns: Turns = ()
    """The question as a chat; then `text` holds all its turns."""
    pictures: tuple[Any, ...] = ()
    """The pictures as the row has them."""


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
    images: str | Literal[False] | None = False
    """The same, of `pictures.COLUMNS`, a column with one picture or a list; False: columns of pictures are not read."""
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
        value, column = value_at(values, question), pictures_in_column(values, self.images)
        if not is_list(value):
            text = prompt_of(values, question)
            return Question(text=text, answer=self._answer_of(values, question, answer, None), pictures=column)
        parts: list[Any] = []
        turns, last = turns_of(value, question, None if self.images is False else parts)
        if last is not None and answer is not None and question.casefold() == "prompt":
            raise RowError(
                f"field {question!r}: the chat ends with a turn of the assistant, and {answer!r} is the answer; remove "
                "that turn from the prompt"
            )
        return Question(
            text=dialogue_of(turns),
            answer=self._answer_of(values, question, answer, last),
            turns=turns,
            pictures=of_parts_or_column(parts, column),
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
            raise ColumnError(_absent(values, ANSWER_COLUMNS))
        else:
            text = ""
        if self.needs_number:
            check_number(text, answer or question)
        return text

    def columns_of(self, values: Mapping[str, Any]) -> dict[str, str | None]:
        """Returns the names of the columns of prompt and answer in a row, None for one that it does not have, and of
        the pictures if it has some."""
        columns = {
            "prompt": column_of(values, self.question, PROMPT_COLUMNS, is_needed=False),
            "answer": column_of(values, self.answer, ANSWER_COLUMNS, is_needed=False),
        }
        if self.images is not False and (name := column_of(values, self.images, COLUMNS, is_needed=False)):
            columns["images"] = name
        return columns

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


def column_of(
    values: Mapping[str, Any], name: str | None, usual: Sequence[str], *, is_needed: bool = True
) -> str | None:
    """Returns the name of a row's column: `name`, or where it is None the first of the usual ones that the row has.

    Raises: RowError where it is needed and absent.
    """
    if name is not None:
        if value_at(values, name) is not ABSENT:
            return name
        if not is_needed:
            return None
        raise ColumnError(f"no field {name!r}; the row has {listed(sorted(map(str, values)))}")
    names = {str(column).casefold(): str(column) for column in reversed(list(values))}
    candidates = [names.get(one, one) for one in usual]
    present = [one for one in candidates if value_at(values, one) is not ABSENT]
    present = [one for one in present if value_at(values, one) is not None] or present
    if is_needed and not present:
        raise ColumnError(_absent(values, usual))
    return present[0] if present else None


def _absent(values: Mapping[str, Any], usual: Sequence[str]) -> str:
    return f"no field {usual[0]!r} or another usual name of it; the row has {listed(sorted(map(str, values)))}"


def load_problems(
    path: Path,
    read: QuestionReader,
    to_prompt: Callable[[str], str],
    *,
    on_bad_row: Literal["stop", "skip"],
    bad_row_key: str = "task.on_bad_row",
    fetches_pictures: bool = False,
) -> Sifted:
    """Reads all problems of a file, in order.

    Args:
        to_prompt: the template, which turns a question into a prompt.
        on_bad_row: stop: raise an error that lists the first bad rows; skip: count them in a note.
        bad_row_key: name of the setting, for messages.
        fetches_pictures: whether pictures with http(s) URLs are fetched.
    Raises: UserError.
    """
    loaded = load_rows(
        path,
        lambda row: _problem(row, read, to_prompt, fetches_pictures=fetches_pictures),
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


# -- values of a row -----------------------------------------------------------------------------------------------


def text_of(values: Mapping[str, Any], name: str) -> str:
    """Returns a value as non-empty text.

    Raises: RowError for anything but text and finite numbers.
    """
    value = value_at(values, name)
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


def prompt_of(values: Mapping[str, Any], name: str) -> str:
    """As `text_of`, for a prompt, which may not be the text of a chat.

    Raises: RowError.
    """
    text = text_of(values, name)
    if _CHAT_TEXT.match(text):
        raise RowError(
            f"field {name!r} holds a chat as text, which would be a prompt as it stands; save the rows as JSON lines "
            "or parquet, which keep lists, or turn the text into a list"
        )
    return text


ABSENT = object()


def value_at(values: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a column, or of `outer.inner`; `ABSENT` if the row has none."""
    if name in values:
        return values[name]
    outer, dot, inner = name.partition(".")
    below = values.get(outer) if dot else None
    return value_at(below, inner) if isinstance(below, Mapping) else ABSENT


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Returns whether a value is a list, as chats and parts of turns are, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


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
    if kind in PICTURE_PARTS and pictures is not None:
        pictures.append(part)
        return MARKER
    if "video" in kind:
        raise RowError(f"{where} has a video; videos need torchvision in transformers, and are not read")
    raise RowError(f"{where} has parts of type {kind!r}" + (" without a text" if kind in TEXT_PARTS else ""))


def dialogue_of(turns: Turns) -> str:
    """Returns a chat as text, for people and rewards to read."""
    return turns[0][1] if len(turns) == 1 else "\n\n".join(f"{role}: {content}" for role, content in turns)


def pictures_in_column(values: Mapping[str, Any], images: str | Literal[False] | None) -> tuple[Any, ...]:
    """The pictures of a column; none where the row has no such column, or null in it.

    Args:
        images: as in `Columns`.
    """
    if images is False:
        return ()
    name = column_of(values, images, COLUMNS, is_needed=images is not None)
    value = None if name is None else value_at(values, name)
    return () if value is None else tuple(value) if is_list(value) else (value,)


def of_parts_or_column(parts: Sequence[Mapping[str, Any]], column: tuple[Any, ...]) -> tuple[Any, ...]:
    """The pictures of a chat: in its parts, or in a column, if the parts say where they go alone. Raises: RowError."""
    own = [part for part in parts if any(part.get(name) is not None for name in HOLDERS)]
    if not own and (column or not parts):
        return column
    if len(own) < len(parts):
        raise RowError(f"of {len(parts)} pictures in the chat {len(parts) - len(own)} have no path, bytes or URL")
    return tuple(own)


def with_markers(turns: Turns, num_pictures: int) -> Turns:
    """Adds the markers of pictures to the first turn of the user, in front of its text."""
    place = next((number for number, (role, _) in enumerate(turns) if role == "user"), len(turns) - 1)
    role, text = turns[place]
    return (*turns[:place], (role, MARKER * num_pictures + text), *turns[place + 1 :])


def check_number(answer: str, name: str) -> None:
    """Raises: RowError if `rlinf_algos.rewards.final_number` finds no number."""
    from rlinf_algos.rewards import final_number

    if len(answer) > MAX_CHARACTERS:
        raise RowError(
            f"the {name} has {len(answer):,} characters; a number is looked for in at most {MAX_CHARACTERS:,}"
        )
    if not _MARKED_NUMBER.search(answer[-MAX_MARKED:]) and final_number(answer) is None:
        raise RowError(f"the {name} holds no number: {answer[-80:]!r}; it should end like `#### 42`")


def _problem(row: Row, read: QuestionReader, to_prompt: Callable[[str], str], *, fetches_pictures: bool) -> TaskProblem:
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
    return _with_pictures(problem, question.pictures, row, fetches=fetches_pictures) if question.pictures else problem


def _with_pictures(problem: TaskProblem, values: Sequence[Any], row: Row, *, fetches: bool) -> TaskProblem:
    """The problem with the pictures of its row; where its text has no marker, they come first. Raises: RowError."""
    pictures = read_pictures(values, row, fetches=fetches)
    texts = [text for _, text in problem.turns] or [problem.prompt]
    num_markers, prompt, turns = sum(text.count(MARKER) for text in texts), problem.prompt, problem.turns
    if not num_markers:
        turns = with_markers(turns, len(pictures)) if turns else ()
        prompt = dialogue_of(turns) if turns else MARKER * len(pictures) + prompt
    elif num_markers != len(pictures):
        raise RowError(f"the problem has the marker {MARKER} {num_markers} times, and the row {len(pictures)} pictures")
    columns = without_pictures(problem.row)
    return replace(problem, prompt=prompt, turns=turns, pictures=pictures, row=columns)


def read_pictures(values: Sequence[Any], row: Row, *, fetches: bool) -> tuple[ProblemPicture, ...]:
    """Reads the pictures of a row.

    Args:
        values: as the row has them.
        fetches: whether pictures with http(s) URLs are fetched.
    Raises: RowError.
    """
    pictures: list[ProblemPicture] = []
    for number, value in enumerate(values, start=1):
        try:
            pictures.append(read_picture(value, row.folder, row.place, fetches=fetches))
        except PictureError as error:
            raise RowError(f"picture {number}: {error}") from error
    return tuple(pictures)
