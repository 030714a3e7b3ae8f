"""Rewards by name."""

from collections.abc import Callable
from typing import TypeVar

from rlinf_algos.errors import RewardError
from rlinf_algos.registry import Registry
from rlinf_algos.rewards.base import RewardFunction

REWARDS: Registry[RewardFunction] = Registry("reward", error=RewardError)


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
