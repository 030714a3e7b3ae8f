"""Rewards for the length of a completion; alone they check nothing, so they are terms of a weighted sum.

Lengths are counted in characters, in words, or in tokens by a function that the caller gives. For a limit in tokens of
the very sample that was generated see DAPO's overlong shaping, which works on the mask.
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
    """0.0 up to `free`, from there down in a straight line to -1.0 at `limit`, and -1.0 beyond.

    The form of DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), with `free` = L_max - L_cache and
    `limit` = L_max. Outcome: "right" where nothing is taken off, else "wrong".

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
    """1.0 at exactly `target`, less in a straight line on both sides, 0.0 from `tolerance` away.

    The linear term of L1-Exact (arXiv:2503.04697, equation 1) with alpha = 1 / tolerance, cut at 0. Outcome: "right"
    where the value is above 0, else "wrong".

    Raises:
        AlgosError: a target or tolerance that is not positive.
    """

    def __init__(self, *, target: int, tolerance: int, unit: Unit | Count = "characters") -> None:
        check_range("target", target, low=1, why="it is a length")
        check_range("tolerance", tolerance, low=1, why="it is the distance at which nothing is left")
        self._target, self._tolerance, self._count = target, tolerance, _count(unit)

    def __call__(self, completion: str, reference: str) -> RewardResult:
        distance = abs(self._count(completion) - self._target)
        value = max(0.0, 1.0 - distance / self._tolerance)
        return RewardResult(value=value, outcome="right" if value > 0 else "wrong", has_verdict=False)
