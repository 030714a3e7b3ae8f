"""Reads rows as examples for supervised training: chats, prompts with completions, and plain texts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlinf.config.supervised import ExampleColumnsConfig
from rlinf.tasks.base import Turns
from rlinf.tasks.pictures import DEFAULT_READING, PictureReading
from rlinf.tasks.questions import MAX_CHARACTERS, all_turns_of
from rlinf.tasks.row_pictures import RowPictures, new_parts, pictures_of_row, place_pictures
from rlinf.tasks.row_values import ColumnError, RowError, column_of, is_list, prompt_of, text_of, value_at
from rlinf.tasks.rows import Row, listed
from rlinf.tasks.videos import PictureOrVideo

CHAT_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = ("prompt", "question", "problem", "query", "instruction", "input")
COMPLETION_COLUMNS = ("completion", "response", "output", "answer", "solution", "target")
TEXT_COLUMNS = ("text",)
"""Usual names of the columns."""
ASSISTANT = "assistant"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleRow:
    """What a row says: what a model is to imitate: a chat, a prompt with its completion, or a text without a prompt."""

    turns: Turns = ()
    """The chat; empty for texts."""
    num_given: int = 0
    """The first turns that are the prompt; turns of the assistant among them are not imitated."""
    prompt: str | None = None
    """The text before the completion; None: there is none."""
    completion: str = ""
    """Without turns: the completion, or the whole text."""
    pictures: tuple[PictureOrVideo, ...] = ()
    """What the markers of the prompt, or of turns that are not imitated, stand for, in their order."""
    place: str = ""
    """`file.jsonl:12`"""

    @property
    def num_bytes(self) -> int:
        """Memory of its pictures."""
        return sum(picture.num_bytes for picture in self.pictures)

    @property
    def num_characters(self) -> int:
        """Of all its texts."""
        return len(self.prompt or "") + len(self.completion) + sum(len(content) for _, content in self.turns)

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Role, `prompt`, `completion` or `text` -> text, for people to read."""
        if self.turns:
            return list(self.turns)
        if self.prompt is None:
            return [("text", self.completion)]
        return [("prompt", self.prompt), ("completion", self.completion)]

    @property
    def fingerprint(self) -> bytes:
        """Digest of all that is trained on."""
        parts = (self.turns, self.num_given, self.prompt, self.completion)
        parts += tuple(picture.digest for picture in self.pictures)
        return hashlib.sha256(repr(parts).encode()).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleColumns:
    """Reads an example from a row. A column that the settings do not name is the first with a usual name."""

    columns: ExampleColumnsConfig
    reading: PictureReading = DEFAULT_READING
    """How their pictures and videos are read."""

    def __call__(self, row: Row) -> ExampleRow:
        """Raises: RowError."""
        parts = new_parts(self.columns)
        example = self._read(row, parts)
        example = with_pictures(example, pictures_of_row(row.values, parts, self.columns), row, self.reading)
        if (size := example.num_characters) > MAX_CHARACTERS:
            raise RowError(f"the example has {size:,} characters; at most {MAX_CHARACTERS:,} are read")
        if example.turns and all(role != ASSISTANT for role, _ in example.turns[example.num_given :]):
            raise RowError("the chat has no turn of the assistant to learn from")
        return example

    def columns_of(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Returns what of a row is used -> its column: `chat`, or `prompt` and `completion`, or `text`.

        Raises: RowError where the settings name a column that the row lacks.
        """
        names = self.columns
        is_text = names.text is not None and names.prompt is None and names.messages is None
        if not is_text and (chat := self._found(values, names.messages, CHAT_COLUMNS)) is not None:
            return {"chat": chat}
        prompt = None if is_text else self._found(values, names.prompt, PROMPT_COLUMNS)
        completion = None if is_text else self._found(values, names.completion, COMPLETION_COLUMNS)
        if prompt is not None and completion is not None:
            return {"prompt": prompt, "completion": completion}
        if prompt is not None and is_list(value_at(values, prompt)):
            return {"chat": prompt}
        if (text := self._found(values, names.text, TEXT_COLUMNS)) is not None:
            return {"text": text}
        return {} if prompt is None else {"prompt": prompt}

    def _read(self, row: Row, parts: list[Any] | None) -> ExampleRow:
        values = row.values
        match self.columns_of(values):
            case {"chat": chat}:
                return ExampleRow(turns=turns_at(values, chat, parts), place=row.place)
            case {"prompt": prompt, "completion": completion}:
                return self._pair(row, prompt, completion, parts)
            case {"text": text}:
                return ExampleRow(completion=text_of(values, text), place=row.place)
            case {"prompt": prompt}:
                has = listed(sorted(map(str, values)))
                raise ColumnError(f"field {prompt!r} has no completion beside it; the row has {has}")
        has = listed(sorted(map(str, values)))
        raise ColumnError(f"neither a chat (messages), nor a prompt with a completion, nor a text; the row has {has}")

    @staticmethod
    def _found(values: Mapping[str, Any], name: str | None, usual: Sequence[str]) -> str | None:
        return column_of(values, name, usual, is_needed=name is not None)

    @staticmethod
    def _pair(row: Row, prompt: str, completion: str, parts: list[Any] | None) -> ExampleRow:
        values = row.values
        question, answer = value_at(values, prompt), value_at(values, completion)
        if not is_list(question) and not is_list(answer):
            text = prompt_of(values, prompt)
            if prompt.casefold() == "instruction" and str(values.get("input") or "").strip():  # rows of Alpaca
                text = f"{text}\n\n{text_of(values, 'input')}"
            return ExampleRow(prompt=text, completion=text_of(values, completion), place=row.place)
        turns, more = prompt_turns(values, prompt, parts), turns_or_text(values, completion, ASSISTANT)
        return ExampleRow(turns=(*turns, *more), num_given=len(turns), place=row.place)


def with_pictures(example: ExampleRow, in_row: RowPictures, row: Row, reading: PictureReading) -> ExampleRow:
    """The example with the pictures and videos of its row; those without markers come first in its prompt.

    Raises: RowError.
    """
    if not in_row:
        return example
    if not example.turns and example.prompt is None:
        raise RowError("a text without a prompt has no place for the pictures of its row")
    answers = [text for role, text in example.turns if role == ASSISTANT]
    for marker, kind, _ in in_row.by_marker:
        if any(marker in text for text in answers):
            raise RowError(f"a turn of the assistant has the marker {marker}; {kind}s are in what it reads")
    prompt, turns, pictures = place_pictures(example.prompt, example.turns, in_row, row, reading)
    return replace(example, prompt=prompt, turns=turns, pictures=pictures)


def turns_at(values: Mapping[str, Any], name: str, pictures: list[Any] | None = None) -> Turns:
    """Returns the turns of a chat; `pictures` as in `all_turns_of`. Raises: RowError."""
    value = value_at(values, name)
    if not is_list(value):
        if isinstance(value, str):
            prompt_of(values, name)
        raise RowError(f"field {name!r} must be a list of turns, is a {type(value).__name__}")
    if not value:
        raise RowError(f"field {name!r}: the chat has no turn")
    return all_turns_of(value, name, pictures)


def prompt_turns(values: Mapping[str, Any], name: str, pictures: list[Any] | None = None) -> Turns:
    """Returns the turns of a prompt, to which an answer follows; `pictures` as in `all_turns_of`. Raises: RowError."""
    if not is_list(value_at(values, name)):
        return (("user", prompt_of(values, name)),)
    turns = turns_at(values, name, pictures)
    if turns and turns[-1][0] == ASSISTANT:
        raise RowError(f"field {name!r} ends with a turn of the assistant, and the answer is one too; remove it there")
    return turns


def turns_or_text(values: Mapping[str, Any], name: str, role: str) -> Turns:
    """Returns the turns of a column, or its text as one turn of a role. Raises: RowError."""
    return turns_at(values, name) if is_list(value_at(values, name)) else ((role, text_of(values, name)),)
