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
    """Decorator: registers the function as `name`.

    Raises:
        RewardError: the name is taken by another function.
    """
    return REWARDS.register(name)


def reward_names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return REWARDS.names()


def get_reward(name: str) -> RewardFunction:
    """The reward with that name, or a custom one at "package.module:function" (an import path works in any process).

    Raises:
        RewardError: no such name (the message suggests a similar one), or the path does not lead to a function.
    """
    return REWARDS.get(name)
