"""Rewards by name, and the one way to call them that never turns a crash into a 0."""

from collections.abc import Callable, Sequence

from rlinf_algos.errors import RewardError
from rlinf_algos.registry import Registry
from rlinf_algos.rewards.base import RewardFunction, RewardResult

REWARDS: Registry[RewardFunction] = Registry("reward", error=RewardError)


def register_reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
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


def score(reward: RewardFunction | str, completion: str, reference: str) -> RewardResult:
    """Calls the reward and makes sure of its result.

    Args:
        reward: a function or a name as for `get_reward`.
        completion: the text the policy produced, without the prompt.
        reference: the right answer, in the form the reward expects.

    Raises:
        RewardError: the checker crashed (its exception is the cause) or returned something else than a RewardResult.
    """
    function = get_reward(reward) if isinstance(reward, str) else reward
    name = reward if isinstance(reward, str) else getattr(reward, "__name__", repr(reward))
    where = f"reward {name!r} on completion {_short(completion)}, reference {_short(reference)}"
    try:
        result = function(completion, reference)
    except Exception as e:
        raise RewardError(f"{where}: {type(e).__name__}: {e}") from e
    if not isinstance(result, RewardResult):
        raise RewardError(f"{where}: returned {type(result).__name__} {result!r}; return a RewardResult")
    return result


def score_all(
    reward: RewardFunction | str, completions: Sequence[str], references: Sequence[str]
) -> tuple[RewardResult, ...]:
    """`score` for each completion with its own reference, in order.

    Raises:
        RewardError: as `score`; or the two have different lengths.
    """
    if len(completions) != len(references):
        raise RewardError(f"{len(completions)} completions, {len(references)} references; pass one for each")
    function = get_reward(reward) if isinstance(reward, str) else reward
    return tuple(score(function, c, r) for c, r in zip(completions, references, strict=True))


def _short(text: object) -> str:
    """The end of a text: answers are there."""
    shown = repr(text)
    return shown if len(shown) <= 120 else f"...{shown[-117:]}"
