"""What a rule-checked reward is: a function from a completion and a reference answer to a `RewardResult`."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from rlinf_algos.errors import RewardError

Outcome = Literal["right", "wrong", "unparseable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """A reward and how it came about. "unparseable" is not "wrong": the completion held no answer to check.

    Example: RewardResult(value=1.0, outcome="right", answer="18")
    """

    value: float
    """Finite; 1.0 for right and 0.0 otherwise in the rewards of this package."""
    outcome: Outcome
    answer: str | None = None
    """The answer as found in the completion; None where there was none."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise RewardError(f"RewardResult.value={self.value} is not finite; a reward is a number")
        if self.outcome not in get_args(Outcome):
            raise RewardError(f"RewardResult.outcome={self.outcome!r}; use one of {', '.join(get_args(Outcome))}")


class RewardFunction(Protocol):
    """Pure: the same arguments give the same result. Raises `RewardError` for an unusable reference."""

    def __call__(self, completion: str, reference: str, /) -> RewardResult: ...
