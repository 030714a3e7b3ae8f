"""The tasks that both sides of the TRL comparison train on. Needs neither rlinf nor TRL, so that each side's
interpreter can import it. TRL_COMPARISON_TASK chooses one, for every process of a comparison:

    sort    the size of the recipe sort-grpo: 0.3M parameters, prompts of 9 tokens, completions of up to 9
    long    2.9M parameters, prompts of 6 tokens, completions of up to 32
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

GROUP_SIZE = 8
NUM_PROMPTS = 64
"""Prompts of a step, which has NUM_PROMPTS * GROUP_SIZE completions."""
LEARNING_RATE = 1e-4
NUM_SPECIAL_TOKENS = 3


@dataclass(frozen=True)
class Task:
    """Sizes of one task."""

    alphabet: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    max_new_tokens: int


TASKS = {
    "sort": Task("0123456789+=", hidden_size=96, intermediate_size=256, num_layers=3, max_new_tokens=9),
    "long": Task(
        "0123456789+=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW",
        hidden_size=256,
        intermediate_size=688,
        num_layers=4,
        max_new_tokens=32,
    ),
}
NAME = os.environ.get("TRL_COMPARISON_TASK", "sort")
TASK = TASKS[NAME]
MAX_NEW_TOKENS = TASK.max_new_tokens
ALPHABET = TASK.alphabet


def prompts(step: int) -> list[str]:
    """The prompts of one step, all equally long."""
    generator = random.Random(step)
    if NAME == "sort":
        return [f"{generator.randrange(10**8):08d}=" for _ in range(NUM_PROMPTS)]
    return [f"{generator.randint(10, 99)}+{generator.randint(10, 99)}=" for _ in range(NUM_PROMPTS)]


def digit_share(completion: str) -> float:
    """The reward: digits in the text, as a share of the longest completion."""
    return sum(character.isdigit() for character in completion) / MAX_NEW_TOKENS
