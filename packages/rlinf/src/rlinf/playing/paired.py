"""Statistics of two policies on the same starts: every start gives a pair of outcomes, success or not.

Only pairs that differ tell which policy is better. The test is McNemar's, exact (Psychometrika 12, 1947): given their
number, each of them favours either policy with probability 1/2 if both are equally good. The interval of the difference
is Tango's score interval (Statistics in Medicine 17, 1998, p. 891), which keeps its coverage where successes are rare
or flips are few, as the interval of a normal distribution does not. The number of episodes is that of Connor
(Biometrics 43, 1987, p. 207).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import Self

Z_95 = 1.959963984540054
"""95 % of a normal distribution lie within this many standard deviations."""
Z_POWER_80 = 0.8416212335729143
"""80 % of a normal distribution lie below this many standard deviations."""
_BISECTIONS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedOutcomes:
    """Counts of starts by the outcomes of both policies.

    Example: A succeeds on starts 1 and 2, B on starts 2, 3 and 4 of 5: both=1, only_a=1, only_b=2, neither=1.
    """

    both: int
    only_a: int
    only_b: int
    neither: int

    @classmethod
    def of(cls, pairs: Iterable[tuple[bool, bool]]) -> Self:
        """Counts (success of A, success of B) of each start."""
        counts = {(True, True): 0, (True, False): 0, (False, True): 0, (False, False): 0}
        for a, b in pairs:
            counts[bool(a), bool(b)] += 1
        return cls(
            both=counts[True, True],
            only_a=counts[True, False],
            only_b=counts[False, True],
            neither=counts[False, False],
        )

    @property
    def num_starts(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def num_flipped(self) -> int:
        """Starts with different outcomes."""
        return self.only_a + self.only_b

    @property
    def success_a(self) -> float:
        return (self.both + self.only_a) / self.num_starts

    @property
    def success_b(self) -> float:
        return (self.both + self.only_b) / self.num_starts

    @property
    def difference(self) -> float:
        """Success of B minus that of A."""
        return (self.only_b - self.only_a) / self.num_starts


def mcnemar(only_a: int, only_b: int) -> float:
    """Returns the exact two-sided p-value of McNemar's test, at most 1.

    Example: mcnemar(1, 7) is 18 / 256 = 0.0703, since 9 of the 256 equally likely splits of 8 flips have at most one on
    the left, and 9 at most one on the right.
    """
    num_flipped, least = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(num_flipped, k) for k in range(least + 1))
    return min(1.0, 2 * tail / 2**num_flipped)


def difference_interval(outcomes: PairedOutcomes, z: float = Z_95) -> tuple[float, float]:
    """Returns Tango's interval of the difference in success, B minus A: all differences that a score test does not
    reject. It contains the observed difference.

    Args:
        z: standard deviations; 1.96 for 95 %.

    Example: with only_a=1, only_b=7 and 13 others it is 0.026 to 0.517 around 0.286.
    """

    def score(difference: float) -> float:
        return _score(outcomes.only_b, outcomes.only_a, outcomes.num_starts, difference)

    observed = outcomes.difference
    lower = _crossing(lambda value: score(value) <= z, outside=-1.0, inside=observed)
    upper = _crossing(lambda value: score(value) >= -z, outside=1.0, inside=observed)
    return lower, upper


def _score(more: int, fewer: int, num_starts: int, difference: float) -> float:
    """Returns the score statistic of `difference`, given `more` flips towards and `fewer` away from it. The probability
    of the latter is its maximum likelihood estimate under this difference, the root of a quadratic equation."""
    excess = more - fewer - num_starts * difference
    if excess == 0:
        return 0.0
    linear = -more - fewer + (2 * num_starts - more + fewer) * difference
    constant = -fewer * difference * (1 - difference)
    root = (math.sqrt(max(0.0, linear**2 - 8 * num_starts * constant)) - linear) / (4 * num_starts)
    variance = num_starts * (2 * root + difference * (1 - difference))
    return excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess)


def _crossing(accepts: Callable[[float], bool], *, outside: float, inside: float) -> float:
    """Returns the end of the accepted differences between `inside`, which is accepted, and `outside`."""
    if accepts(outside):
        return outside
    for _ in range(_BISECTIONS):
        middle = (outside + inside) / 2
        outside, inside = (outside, middle) if accepts(middle) else (middle, inside)
    return inside


def episodes_needed(difference: float, share_flipped: float) -> int:
    """Returns the number of starts for which McNemar's test at 5 % finds a difference with a probability of 80 %.

    Args:
        difference: above 0, as a share: 0.02 are two points.
        share_flipped: starts with different outcomes, as a share; at least `difference` is assumed, since a difference
            needs as many flips.

    Example: two points take 1,960 starts if 10 % of them flip, and 391 if no more than 2 % do.
    """
    flipped = max(share_flipped, difference)
    root = Z_95 * math.sqrt(flipped) + Z_POWER_80 * math.sqrt(max(0.0, flipped - difference**2))
    return math.ceil(root**2 / difference**2)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns the p-values adjusted for their number (Holm, Scandinavian Journal of Statistics 6, 1979): with
    them, the chance that any falls below 5 % by accident is at most 5 %.

    Example: holm([0.01, 0.04, 0.03]) is [0.03, 0.06, 0.06].
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, p_values[place] * (len(p_values) - rank)))
        adjusted[place] = largest
    return adjusted
