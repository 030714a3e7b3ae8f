"""Rewards by name."""

from collections.abc import Callable
from typing import TypeVar

from rlinf_algos.errors import RewardError
from rlinf_algos.registry import Registry
from rlinf_algos.rewards.base import RewardFunction

REWARDS: Registry[RewardFunction] = Registry(
    "reward",
    {
        "code_tests": "rlinf_algos.rewards.program:code_tests",
        "exact_match": "rlinf_algos.rewards.exact:exact_match",
        "math_answer": "rlinf_algos.rewards.mathematics:math_answer",
        "multiple_choice": "rlinf_algos.rewards.choice:multiple_choice",
        "numeric_match": "rlinf_algos.rewards.numeric:numeric_match",
        "think_answer_format": "rlinf_algos.rewards.tagged:think_answer_format",
    },
    error=RewardError,
)


F = TypeVar("F", bound=RewardFunction)


def register_reward(name: str) -> Callable[[F], F]:
    """Decorator: makes the function known as `name`.

    Raises:
        RewardError: the name is taken by another function.
    """
    return REWARDS.register(name)


def reward_names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return REWARDS.names()


def get_reward(name: str) -> RewardFunction:
    """The reward of that name, or of an import path "package.module:function" (for one's own, in any process).

    Raises:
        RewardError: nothing is known by that name; says what is near. Or the path does not lead to a function.
    """
    return REWARDS.get(name)
