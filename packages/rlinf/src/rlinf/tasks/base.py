"""What a task offers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskProblem:
    """One problem as text."""

    prompt: str
    answer: str
    place: str = ""
    """Where it was read, `file.jsonl:12`; empty for one that was made."""
    number: int = 0
    """Number of its row in the file, from 1."""
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """All columns of its row; none of a problem that was made."""

    @property
    def fingerprint(self) -> bytes:
        """Differs where the prompt, the answer or any column of the row does."""
        return hashlib.sha256(repr((self.prompt, self.answer, self.row_json)).encode()).digest()

    @property
    def row_json(self) -> str:
        """The row as it goes to a reward that reads it; what JSON cannot hold is text."""
        return json.dumps(dict(self.row), default=str)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sifted:
    """The problems of a set, after those that are no problem or too long were dealt with."""

    problems: list[TaskProblem]
    num_found: int
    """Bad rows that were skipped, or long prompts that were dropped or cut."""
    notes: tuple[str, ...]
    """What a reader of the run must know of them."""


class Task(Protocol):
    """A stream of training problems that can be entered anywhere, and a fixed held-out set."""

    @property
    def alphabet(self) -> str | None:
        """Every character that prompts and answers use, for a tokenizer made on the spot, one token for each; all
        prompts have one length then. None for natural language."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What a reader of the run must know: rows that were skipped, prompts that were cut."""
        ...

    def train_problem(self, index: int) -> TaskProblem:
        """Problem `index` of the training stream, a pure function of the run's seed and the index."""
        ...

    def held_out(self) -> Mapping[str, list[TaskProblem]]:
        """Sets of problems for evaluation, never in the training stream; the one that the score is of has no name."""
        ...
