"""The protocol of tasks and its records."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlinf.tasks.spooled import SpooledRows
from rlinf.tasks.videos import PictureOrVideo

Turns = tuple[tuple[str, str], ...]
"""Role and text of each turn of a chat, the last of which is not the assistant's."""
SYSTEM_ROLES = ("system", "developer")
"""Roles of the turns that instruct the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskProblem:
    """One problem as text, or as the turns of a chat."""

    prompt: str
    """The text; of a chat all its turns, for people and rewards to read."""
    answer: str
    """The reference answer; empty for a reward that needs none."""
    turns: Turns = ()
    """The chat that the model is to answer; empty for a plain prompt."""
    place: str = ""
    """Its place in a file, `file.jsonl:12`; empty for generated problems."""
    number: int = 0
    """Row number in the file, from 1."""
    solutions: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Conversations of an episode that solves it, each in turns: who writes (`policy`, `tool`, `user`) and the text.
    They follow the prompt; one whose first turn is of the `task` does not. Empty: the answer solves it."""
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """All columns of its row; empty for generated problems."""
    pictures: tuple[PictureOrVideo, ...] = ()
    """What the markers `<image>` and `<video>` of the prompt stand for, in their order. Without pictures the marker of
    one is text, and without videos that of a video."""

    @property
    def content(self) -> str | Turns:
        """What is encoded as the prompt."""
        return self.turns or self.prompt

    @property
    def identity(self) -> tuple[str, ...]:
        """What the model is asked: the prompt, and the digests of its pictures."""
        return self.prompt, *(picture.digest for picture in self.pictures)

    @property
    def num_bytes(self) -> int:
        """Memory of its pictures."""
        return sum(picture.num_bytes for picture in self.pictures)

    @property
    def fingerprint(self) -> bytes:
        """Digest of the prompt with its pictures, the answer and all columns of the row."""
        prompt, *pictures = self.identity
        return hashlib.sha256(repr((prompt, self.answer, self.row_json, *pictures)).encode()).digest()

    @property
    def row_json(self) -> str:
        """The row as JSON, for rewards that read it; values that JSON does not support become text."""
        return json.dumps(dict(self.row), default=str)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sifted:
    """The problems of a set, after bad rows or long prompts were handled."""

    problems: SpooledRows[TaskProblem]
    num_found: int
    """Bad rows that were skipped, or long prompts that were dropped or cut."""
    notes: tuple[str, ...]
    """Notes for the user about them."""


class EpochOrder:
    """The order in which a stream visits the entries of a set: every epoch a new one, which depends only on seed and
    epoch, so that the stream can be entered anywhere.

    Args:
        name: tells apart the sets of one seed; empty for a single one.
    """

    def __init__(self, seed: int, name: str = "") -> None:
        self._seed, self._suffix = seed, f" {name}" if name else ""
        self._epoch = -1
        self._order: list[int] = []

    def place(self, index: int, size: int) -> int:
        """Returns the place in a set of `size` entries of entry `index` of the stream."""
        epoch, position = divmod(index, size)
        if epoch != self._epoch or len(self._order) != size:
            self._epoch, self._order = epoch, list(range(size))
            random.Random(f"epoch {self._seed} {epoch}{self._suffix}").shuffle(self._order)
        return self._order[position]


class HasFingerprint(Protocol):
    """A row or a problem of a data file."""

    @property
    def fingerprint(self) -> bytes:
        """Digest of all that is trained on."""
        ...


def digest_of(rows: Iterable[HasFingerprint]) -> str:
    """Returns the digest of a set, in its order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.fingerprint)
    return digest.hexdigest()


class Task(Protocol):
    """A stream of training problems with random access, and fixed held-out sets."""

    @property
    def alphabet(self) -> str | None:
        """All characters of prompts and answers, from which a tokenizer with one token per character is made; all
        prompts then have the same length. None for natural language."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user: skipped rows, shortened prompts."""
        ...

    def train_problem(self, index: int) -> TaskProblem:
        """Returns problem `index` of the training stream, a pure function of the run's seed and the index."""
        ...

    def held_out(self) -> Mapping[str, Sequence[TaskProblem]]:
        """Sets of problems for evaluation, not in the training stream; the set that the score is computed on has the
        name ""."""
        ...
