"""Reads rows as preferences: a prompt with two answers, of which one is preferred."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlinf.config.supervised import PreferenceColumnsConfig
from rlinf.tasks.base import Turns
from rlinf.tasks.example_tokens import ExampleEncoder, TokenizedExample, fit_rows
from rlinf.tasks.examples import (
    ASSISTANT,
    PROMPT_COLUMNS,
    ExampleRow,
    prompt_turns,
    turns_at,
    turns_or_text,
    with_pictures,
)
from rlinf.tasks.pictures import DEFAULT_READING, PictureReading
from rlinf.tasks.questions import MAX_CHARACTERS
from rlinf.tasks.row_pictures import new_parts, pictures_of_row
from rlinf.tasks.row_values import RowError, column_of, is_list, prompt_of, text_of, value_at
from rlinf.tasks.rows import Row
from rlinf.tasks.spooled import SpooledRows
from rlinf.tasks.videos import PictureOrVideo


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceRow:
    """What a row says: two answers to one prompt."""

    chosen: ExampleRow
    """The prompt with the preferred answer."""
    rejected: ExampleRow

    @property
    def place(self) -> str:
        """`file.jsonl:12`"""
        return self.chosen.place

    @property
    def num_bytes(self) -> int:
        """Memory of its pictures."""
        return self.chosen.num_bytes

    @property
    def num_characters(self) -> int:
        """Of the prompt with the longer answer."""
        return max(self.chosen.num_characters, self.rejected.num_characters)

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Roles or `prompt`, then `chosen` and `rejected` -> text, for people to read."""
        *prompt, (_, chosen) = self.chosen.parts
        return [*prompt, ("chosen", chosen), ("rejected", self.rejected.parts[-1][1])]

    @property
    def fingerprint(self) -> bytes:
        """Digest of all that is trained on."""
        return hashlib.sha256(self.chosen.fingerprint + self.rejected.fingerprint).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceColumns:
    """Reads a pair from a row. An answer is text or one turn of the assistant; without a prompt, both answers are chats
    that begin with it."""

    columns: PreferenceColumnsConfig
    reading: PictureReading = DEFAULT_READING
    """How their pictures and videos are read."""

    def __call__(self, row: Row) -> PreferenceRow:
        """Raises: RowError."""
        values, columns = row.values, self.columns_of(row.values)
        parts = new_parts(self.columns)
        prompt, chosen, rejected = columns.get("prompt"), columns["chosen"], columns["rejected"]
        answers = [value_at(values, chosen), value_at(values, rejected)]
        if prompt is None:
            pair = self._whole_chats(row, chosen, rejected)
        elif is_list(value_at(values, prompt)) or any(map(is_list, answers)):
            turns = prompt_turns(values, prompt, parts)
            pair = [self._chat(row, turns, turns_or_text(values, name, ASSISTANT)) for name in (chosen, rejected)]
        else:
            text = prompt_of(values, prompt)
            pair = [
                ExampleRow(prompt=text, completion=text_of(values, name), place=row.place)
                for name in (chosen, rejected)
            ]
        pictures = pictures_of_row(values, parts, self.columns)
        pair = [with_pictures(one, pictures, row, self.reading) for one in pair]
        if pair[0].fingerprint == pair[1].fingerprint:
            raise RowError(f"{chosen!r} and {rejected!r} are equal, so neither is preferred")
        preference = PreferenceRow(chosen=pair[0], rejected=pair[1])
        if (size := preference.num_characters) > MAX_CHARACTERS:
            raise RowError(f"an answer with its prompt has {size:,} characters; at most {MAX_CHARACTERS:,} are read")
        return preference

    def columns_of(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Returns what of a row is used -> its column: `chosen`, `rejected` and, unless the answers begin with it,
        `prompt`. Raises: RowError."""
        names = self.columns
        chosen = column_of(values, names.chosen, ("chosen",))
        rejected = column_of(values, names.rejected, ("rejected",))
        prompt = column_of(values, names.prompt, PROMPT_COLUMNS, is_needed=names.prompt is not None)
        columns = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        return {use: column for use, column in columns.items() if column is not None}

    def _whole_chats(self, row: Row, chosen: str, rejected: str) -> list[ExampleRow]:
        """The prompt is what both chats begin with."""
        if not all(is_list(value_at(row.values, name)) for name in (chosen, rejected)):
            raise RowError(f"no prompt, and {chosen!r} and {rejected!r} are not both chats that begin with one")
        chats = [turns_at(row.values, name) for name in (chosen, rejected)]
        num_common = 0
        for one, other in zip(*chats, strict=False):
            if one != other:
                break
            num_common += 1
        num_common = min(num_common, *(len(chat) - 1 for chat in chats))
        return [self._chat(row, chat[:num_common], chat[num_common:]) for chat in chats]

    @staticmethod
    def _chat(row: Row, prompt: Turns, answer: Turns) -> ExampleRow:
        if len(answer) != 1 or answer[0][0] != ASSISTANT:
            roles = ", ".join(role for role, _ in answer) or "nothing"
            raise RowError(f"an answer must be one turn of the assistant behind the common prompt, is {roles}")
        if not prompt:
            raise RowError("the two chats have no common beginning, so there is no prompt")
        return ExampleRow(turns=(*prompt, *answer), num_given=len(prompt), place=row.place)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedPreference:
    """A pair as tokens, int32."""

    prompt_ids: Tensor
    """[L]"""
    chosen_ids: Tensor
    rejected_ids: Tensor
    place: str
    pictures: tuple[PictureOrVideo, ...] = ()
    """What the placeholders of the prompt stand for."""
    num_picture_tokens: int = 0
    """Tokens that the pictures add to the prompt."""

    @property
    def num_bytes(self) -> int:
        """Memory of its pictures."""
        return sum(picture.num_bytes for picture in self.pictures)

    @property
    def num_prompt_tokens(self) -> int:
        """Those of its pictures included."""
        return len(self.prompt_ids) + self.num_picture_tokens

    @property
    def num_tokens(self) -> int:
        """Of the prompt with the longer answer."""
        return self.num_prompt_tokens + max(len(self.chosen_ids), len(self.rejected_ids))

    @property
    def num_learned(self) -> int:
        """Of both answers."""
        return len(self.chosen_ids) + len(self.rejected_ids)

    @property
    def parts(self) -> list[tuple[str, Tensor]]:
        """What the tokens are, for people to read."""
        return [("prompt", self.prompt_ids), ("chosen", self.chosen_ids), ("rejected", self.rejected_ids)]

    def cut(self, max_tokens: int) -> TokenizedPreference:
        """The pair without the ends of its answers."""
        room = max(0, max_tokens - self.num_prompt_tokens)
        chosen_ids, rejected_ids = self.chosen_ids[:room].clone(), self.rejected_ids[:room].clone()
        return replace(self, chosen_ids=chosen_ids, rejected_ids=rejected_ids)


def tokenized_preference(encoder: ExampleEncoder, row: PreferenceRow, *, is_whole: bool = False) -> TokenizedPreference:
    """The tokens of a pair: those with a loss are the answers.

    Args:
        is_whole: with what a chat template writes behind the last of them.
    Raises: UserError, as `ExampleEncoder.encode`.
    """
    chosen, rejected = encoder.encode(row.chosen), encoder.encode(row.rejected)
    first, end = _answer_of(chosen)
    other_first, other_end = _answer_of(rejected)
    assert first == other_first and torch.equal(chosen.token_ids[:first], rejected.token_ids[:first]), "one prompt"
    return TokenizedPreference(
        prompt_ids=chosen.token_ids[:first].clone(),
        chosen_ids=chosen.token_ids[first : None if is_whole else end].clone(),
        rejected_ids=rejected.token_ids[first : None if is_whole else other_end].clone(),
        place=chosen.place,
        pictures=chosen.pictures,
        num_picture_tokens=chosen.num_picture_tokens,
    )


def _answer_of(example: TokenizedExample) -> tuple[int, int]:
    """Where the tokens with a loss begin and end."""
    places = example.has_loss.nonzero()[:, 0]
    return int(places[0]), int(places[-1]) + 1


def fit_preferences(
    pairs: Sequence[TokenizedPreference], max_tokens: int, long_examples: str, what: str
) -> tuple[SpooledRows[TokenizedPreference], list[str]]:
    """`fit_examples` for pairs; one whose answers have no token left, or the same ones, is left out."""
    return fit_rows(
        pairs,
        max_tokens,
        long_examples,
        what,
        cut=TokenizedPreference.cut,
        is_kept=_is_preference,
        left_out="pairs have equal answers in tokens",
    )


def _is_preference(pair: TokenizedPreference) -> bool:
    """Whether both answers have tokens, and not the same ones."""
    chosen, rejected = pair.chosen_ids, pair.rejected_ids
    return len(chosen) > 0 and len(rejected) > 0 and not torch.equal(chosen, rejected)
