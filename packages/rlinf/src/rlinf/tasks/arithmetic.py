"""Small generated tasks: sorting digits, adding numbers; and how problems are drawn.

A tenth of all problems, chosen by a checksum of the prompt with its pictures, is held out for evaluation and never
trained on, with any seed.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from rlinf.tasks.base import TaskProblem

HELD_OUT_SEED = 1_000_000
"""Seed of the held-out problems, which are the same for every run."""
HELD_OUT_SHARE = 10


def sort_digits(generator: random.Random, num_digits: int) -> TaskProblem:
    """Returns a problem such as `58312047=` -> `01234578`."""
    digits = "".join(generator.choice("0123456789") for _ in range(num_digits))
    return TaskProblem(prompt=f"{digits}=", answer="".join(sorted(digits)))


def add_digits(generator: random.Random, num_digits: int) -> TaskProblem:
    """Returns a problem such as `12+34=` -> `046`; all numbers have the same length, so answers have a fixed width."""
    a, b = generator.randrange(10**num_digits), generator.randrange(10**num_digits)
    return TaskProblem(prompt=f"{a:0{num_digits}d}+{b:0{num_digits}d}=", answer=f"{a + b:0{num_digits + 1}d}")


class GeneratedTask:
    """Draws problems from a generator, with one seed per index.

    Args:
        draw: the problem of a generator, whose prompt has always the same length.
        alphabet: all characters of its problems and their solutions.
        holds_out: False: evaluation uses problems of the training stream, for a task with few of them.
        shuffles_pictures: each problem gets the pictures of another.
    """

    notes = ()

    def __init__(
        self,
        draw: Callable[[random.Random], TaskProblem],
        alphabet: str,
        num_held_out: int,
        seed: int,
        *,
        holds_out: bool = True,
        shuffles_pictures: bool = False,
    ) -> None:
        self._any_problem, self.alphabet, self._holds_out = draw, alphabet, holds_out
        self._num_held_out = num_held_out
        self._seed = seed
        self._shuffles_pictures = shuffles_pictures

    def train_problem(self, index: int) -> TaskProblem:
        return self._draw(random.Random(f"train {self._seed} {index}"), held_out=False)

    def held_out(self) -> Mapping[str, list[TaskProblem]]:
        seeds = range(HELD_OUT_SEED, HELD_OUT_SEED + self._num_held_out)
        return {"": [self._draw(random.Random(seed), held_out=True) for seed in seeds]}

    def _draw(self, generator: random.Random, *, held_out: bool) -> TaskProblem:
        while True:
            problem = self._any_problem(generator)
            if self._holds_out and (_checksum(problem) % HELD_OUT_SHARE == 0) != held_out:
                continue
            if not self._shuffles_pictures:
                return problem
            return replace(problem, pictures=self._any_problem(generator).pictures)


def _checksum(problem: TaskProblem) -> int:
    checksum = zlib.crc32(problem.prompt.encode())
    for picture in problem.pictures:
        checksum = zlib.crc32(picture.content, checksum)
    return checksum
