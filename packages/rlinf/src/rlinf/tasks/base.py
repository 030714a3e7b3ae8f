"""What a task offers, and which one a config means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlinf.config.schema import AddTask, JsonlTask, SortTask


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One problem as text."""

    prompt: str
    answer: str


class Task(Protocol):
    """A stream of training problems that can be entered anywhere, and a fixed held-out set."""

    @property
    def alphabet(self) -> str | None:
        """Every character that prompts and answers use, for a tokenizer made on the spot; None for natural language."""
        ...

    @property
    def same_length(self) -> bool:
        """Whether every prompt has the same number of tokens (under a tokenizer of single characters)."""
        ...

    def train_problem(self, index: int) -> Problem:
        """Problem `index` of the training stream, a pure function of the run's seed and the index."""
        ...

    def held_out(self) -> list[Problem]:
        """Problems for evaluation; never in the training stream."""
        ...


def make_task(config: SortTask | AddTask | JsonlTask, seed: int) -> Task:
    """The task that a config names.

    Raises: UserError for a data file that is missing, torn or lacks a field, with file and line.
    """
    from rlinf.tasks.arithmetic import AddDigits, SortDigits
    from rlinf.tasks.jsonl import JsonlProblems

    if isinstance(config, SortTask):
        return SortDigits(config.num_digits, config.num_held_out, seed)
    if isinstance(config, AddTask):
        return AddDigits(config.num_digits, config.num_held_out, seed)
    return JsonlProblems(config, seed)
