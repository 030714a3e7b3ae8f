"""Small exact tasks made on the spot: sorting digits, adding numbers.

A tenth of all problems, chosen by a checksum of the prompt, is held out: it is never trained on, whatever the seed,
and the evaluation is drawn from it.
"""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping

from rlinf.tasks.base import Problem

HELD_OUT_SEED = 1_000_000
"""The held-out problems are the same for every run."""
HELD_OUT_SHARE = 10


class GeneratedTask(ABC):
    """Draws problems from a generator, one seed for each index."""

    alphabet = "0123456789+="
    notes = ()

    def __init__(self, num_digits: int, num_held_out: int, seed: int) -> None:
        self._num_digits = num_digits
        self._num_held_out = num_held_out
        self._seed = seed

    @abstractmethod
    def draw(self, generator: random.Random) -> Problem:
        """Any problem."""

    def train_problem(self, index: int) -> Problem:
        return self._draw(random.Random(f"train {self._seed} {index}"), held_out=False)

    def held_out(self) -> list[Problem]:
        return [self._draw(random.Random(HELD_OUT_SEED + i), held_out=True) for i in range(self._num_held_out)]

    def more_held_out(self) -> Mapping[str, list[Problem]]:
        return {}

    def _draw(self, generator: random.Random, *, held_out: bool) -> Problem:
        while True:
            problem = self.draw(generator)
            if is_held_out(problem) == held_out:
                return problem


class SortDigits(GeneratedTask):
    """`58312047=` -> `01234578`"""

    def draw(self, generator: random.Random) -> Problem:
        digits = "".join(generator.choice("0123456789") for _ in range(self._num_digits))
        return Problem(prompt=f"{digits}=", answer="".join(sorted(digits)))


class AddDigits(GeneratedTask):
    """`12+34=` -> `046`: every number of the same length, so that the answer has a fixed width."""

    def draw(self, generator: random.Random) -> Problem:
        width, limit = self._num_digits, 10**self._num_digits
        a, b = generator.randrange(limit), generator.randrange(limit)
        return Problem(prompt=f"{a:0{width}d}+{b:0{width}d}=", answer=f"{a + b:0{width + 1}d}")


def is_held_out(problem: Problem) -> bool:
    """Whether the problem belongs to evaluation."""
    return zlib.crc32(problem.prompt.encode()) % HELD_OUT_SHARE == 0
