"""Rewards for the length of a completion. They do not check the answer, so use them as terms of a weighted sum.

Lengths are counted in characters, in words, or by a function of the caller, for example in tokens. For a limit on the
generated tokens use DAPO's overlong shaping, which works on the mask.
"""

from collections.abc import Callable
from typing import Literal

from rlinf_algos.errors import RewardError
from rlinf_algos.ranges import check_range
from rlinf_algos.rewards.base import RewardResult

Unit = Literal["characters", "words"]
Count = Callable[[str], int]


def _count(unit: Unit | Count) -> Count:
    if callable(unit):
        return unit
    if unit not in ("characters", "words"):
        raise RewardError(f"unit={unit!r}; use 'characters', 'words', or a function from a text to its length")
    return len if unit == "characters" else lambda text: len(text.split())


class LengthPenalty:
    """0.0 up to `free`, then linearly down to -1.0 at `limit`, and -1.0 beyond.

    The form of DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), with `free` = L_max - L_cache and
    `limit` = L_max. Outcome: "right" if the value is 0.0, else "wrong".

    Raises:
        AlgosError: unless 0 <= free < limit.
    """

    def __init__(self, *, free: int, limit: int, unit: Unit | Count = "characters") -> None:
        check_range("free", free, low=0, why="it is a length")
        check_range("limit", limit, low=free + 1, why="the penalty grows from free to limit")
        self._free, self._limit, self._count = free, limit, _count(unit)

    def __call__(self, completion: str, reference: str) -> RewardResult:
        excess = max(0, min(self._count(completion), self._limit) - self._free)
        value = -excess / (self._limit - self._free)
        return RewardResult(value=value + 0.0, outcome="wrong" if excess else "right", has_verdict=False)


class LengthTarget:
    """1.0 at exactly `target`, falling linearly on both sides, and 0.0 at a distance of `tolerance` or more.

    The linear term of L1-Exact (arXiv:2503.04697, equation 1) with alpha = 1 / tolerance, cut at 0. Outcome: "right"
    if the value is above 0, else "wrong".

    Raises:
        AlgosError: a target or tolerance that is not positive.
    """

    def __init__(self, *, target: int, tolerance: int, unit: Unit | Count = "characters") -> None:
        check_range("target", target, low=1, why="it is a length")
        check_range("tolerance", tolerance, low=1, why="it is the distance at which the reward is 0")
        self._target, self._tolerance, self._count = target, tolerance, _count(unit)

    def __call__(self, completion: str, reference: str) -> RewardResult:
        distance = abs(self._count(completion) - self._target)
        value = max(0.0, 1.0 - distance / self._tolerance)
        return RewardResult(value=value, outcome="right" if value > 0 else "wrong", has_verdict=False)
