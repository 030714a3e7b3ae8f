"""The task that both sides of the TRL comparison train on. Needs neither rlinf nor TRL, so that each side's interpreter
can import it."""

from __future__ import annotations

import random

GROUP_SIZE = 8
NUM_PROMPTS = 64
"""Of a step; NUM_PROMPTS * GROUP_SIZE completions."""
MAX_NEW_TOKENS = 32
LEARNING_RATE = 1e-4
NUM_SPECIAL_TOKENS = 3
ALPHABET = "0123456789+=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
"""With the special tokens a vocabulary of 64."""


def prompts(step: int) -> list[str]:
    """Those of one step, all of six characters."""
    generator = random.Random(step)
    return [f"{generator.randint(10, 99)}+{generator.randint(10, 99)}=" for _ in range(NUM_PROMPTS)]


def digit_share(completion: str) -> float:
    """The reward: digits in the text, as a share of the longest completion."""
    return sum(character.isdigit() for character in completion) / MAX_NEW_TOKENS
