"""How long a simulator may take before it counts as hung: many times as long as its like have taken so far."""

from __future__ import annotations

_TIMES_THE_SLOWEST = 20
_TIMES_A_START = 4
"""Of the slowest start: how long a simulator may take to be made, which other work on the machine sways less."""
_LEAST_S = 20.0
"""A busy machine can keep any process from running for some seconds."""


class Patience:
    """Limits in seconds for commands of a known amount of work.

    Example: the slowest action so far took 0.8 s, so that a chunk of 4 actions may take 20 * 4 * 0.8 = 64 s.

    Args:
        longest_s: the limit of a command that was not measured before, and of any other.
        limit_s: one limit for commands of every kind but "make", instead of those derived; None: derived.
    """

    def __init__(self, *, longest_s: float, limit_s: float | None = None) -> None:
        self.longest_s = longest_s
        self._limit_s = limit_s
        self._slowest_s: dict[str, float] = {}

    def limit_s(self, kind: str | None, amount: int, *, num_losses: int) -> float:
        """For `amount` pieces of work of one kind (actions of a chunk); twice as much after every loss at this place,
        so that what is only slow gets through. None: work like no other."""
        if kind is None:
            limit = self.longest_s
        elif kind == "make":
            limit = max(_LEAST_S, _TIMES_A_START * self._slowest_s.get(kind, self.longest_s))
        elif self._limit_s is not None:
            limit = self._limit_s
        elif kind in self._slowest_s:
            limit = max(_LEAST_S, _TIMES_THE_SLOWEST * amount * self._slowest_s[kind])
        else:
            limit = self.longest_s
        return min(self.longest_s, limit * 2**num_losses)

    def limit_of_return_s(self, num_chunks: int, num_actions: int, *, num_losses: int) -> float:
        """For beginning an episode again: a reset, and chunks with as many actions in all."""
        if self._limit_s is not None:
            return min(self.longest_s, (1 + num_chunks) * self._limit_s * 2**num_losses)
        reset_s = self.limit_s("reset", 1, num_losses=num_losses)
        return min(self.longest_s, reset_s + self.limit_s("step", num_actions, num_losses=num_losses))

    def took(self, kind: str | None, amount: int, seconds: float) -> None:
        """Tell what an answered command took."""
        if kind is not None:
            self._slowest_s[kind] = max(self._slowest_s.get(kind, 0.0), seconds / amount)
